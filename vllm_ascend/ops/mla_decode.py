"""Absorbed MLA attention of one new token per sequence over the paged cache, as one kernel.

Limits: float16 or bfloat16; DeepSeek's sizes (latent 512, rope 64); 1 to 128 heads, a power of two; block size a
multiple of 16. Tolerance: 1e-2 (bfloat16), relative.
"""

from __future__ import annotations

from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache


def mla_decode(q_latent_BNL: Tensor, q_rope_BNR: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """See ``RolloutOps.mla_decode``."""
    import torch_npu

    # One KV head: pages as [num_blocks, 1, block_size, channels].
    latent_pages, rope_pages = (pages.unsqueeze(1) for pages in cache)
    out_BN1L: Tensor = torch_npu.npu_fused_infer_attention_score(
        q_latent_BNL.unsqueeze(2).contiguous(),
        latent_pages,
        latent_pages,
        query_rope=q_rope_BNR.unsqueeze(2).contiguous(),
        key_rope=rope_pages,
        num_heads=q_latent_BNL.shape[1],
        num_key_value_heads=1,
        input_layout="BNSD",
        scale=scale,
        block_table=meta.block_tables,
        block_size=meta.block_size,
        actual_seq_lengths_kv=meta.seq_lens_host.tolist(),
    )[0]
    return out_BN1L.squeeze(2)
