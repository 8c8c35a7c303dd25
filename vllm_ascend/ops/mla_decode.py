"""Absorbed MLA attention of one new token per sequence over the paged cache, as one kernel.

Limits of the paged kernel: float16 or bfloat16; DeepSeek's sizes (latent 512, rope 64); 1 to 128 heads, a power of two;
block size a multiple of 16 up to 512. Float32 (for debugging) and other sizes gather the pages of every sequence up to
the width of the block tables and run npu_fusion_attention, which takes head sizes up to 768: B x S x (L + R) elements
beside the cache. Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.

In a recorded step the paged kernel's sequence lengths, which it takes from the host, are renewed before each replay;
the gathering form reads them on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache
from vllm.transformers_utils.config import DeepseekV3Config, HFConfig
from vllm_ascend.compilation.acl_graph import record_renewable
from vllm_ascend.ops.kv_layout import read_blocks

PAGED_LATENT, PAGED_ROPE = 512, 64
MAX_HEADS = 128
BLOCK_STEP, MAX_BLOCK = 16, 512


def mla_decode(q_latent_BNL: Tensor, q_rope_BNR: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """See ``RolloutOps.mla_decode``."""
    if _is_paged(q_latent_BNL.shape[-1], q_rope_BNR.shape[-1], q_latent_BNL.dtype != torch.float32):
        return _paged(q_latent_BNL, q_rope_BNR, cache, meta, scale)
    return _gathered(torch.cat((q_latent_BNL, q_rope_BNR), dim=-1), cache, meta, scale)[..., : q_latent_BNL.shape[-1]]


def head_problem(heads: int, hf: HFConfig, dtype: str) -> str | None:
    """Why the paged kernel cannot take a rank's `heads`, None when it can or is not used."""
    if not isinstance(hf, DeepseekV3Config):
        return None
    is_power_of_two = heads > 0 and heads & (heads - 1) == 0
    if not _is_paged(hf.kv_lora_rank, hf.qk_rope_head_dim, dtype != "float32") or (
        is_power_of_two and heads <= MAX_HEADS
    ):
        return None
    return (
        f"num_attention_heads={hf.num_attention_heads} leaves {heads} heads to a rank, but the decode kernel on npu "
        f"takes a power of two up to {MAX_HEADS}; choose another tensor_parallel_size"
    )


def _is_paged(latent: int, rope: int, is_half_precision: bool) -> bool:
    return is_half_precision and (latent, rope) == (PAGED_LATENT, PAGED_ROPE)


def _paged(q_latent_BNL: Tensor, q_rope_BNR: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    import torch_npu

    # One query of each sequence and one KV head: [B, N, 1, channels] against pages [num_blocks, 1, block_size, ...].
    query, query_rope = q_latent_BNL.unsqueeze(2).contiguous(), q_rope_BNR.unsqueeze(2).contiguous()
    latent_pages, rope_pages = (pages.unsqueeze(1) for pages in cache)
    heads = q_latent_BNL.shape[1]
    if meta.before_replay is None:
        out_BN1L: Tensor = torch_npu.npu_fused_infer_attention_score(
            query,
            latent_pages,
            latent_pages,
            query_rope=query_rope,
            key_rope=rope_pages,
            num_heads=heads,
            num_key_value_heads=1,
            input_layout="BNSD",
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=meta.seq_lens_host.tolist(),
        )[0]
        return out_BN1L.squeeze(2)
    if "paged_workspace" not in meta.scratch:  # the layers run one after the other, so they share it
        meta.scratch["paged_workspace"] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
            query,
            latent_pages,
            latent_pages,
            query_rope=query_rope,
            key_rope=rope_pages,
            num_heads=heads,
            num_key_value_heads=1,
            input_layout="BNSD",
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=[meta.block_tables.shape[1] * meta.block_size] * len(query),
        )
    workspace, output, no_lse = meta.scratch["paged_workspace"], torch.empty_like(query), query.new_empty(1)

    def launch() -> None:
        torch_npu.npu_fused_infer_attention_score.out(
            query,
            latent_pages,
            latent_pages,
            query_rope=query_rope,
            key_rope=rope_pages,
            num_heads=heads,
            num_key_value_heads=1,
            input_layout="BNSD",
            scale=scale,
            block_table=meta.block_tables,
            block_size=meta.block_size,
            actual_seq_lengths_kv=meta.seq_lens_host.tolist(),
            workspace=workspace,
            out=[output, no_lse],
        )

    record_renewable(launch, meta.before_replay)
    return output.squeeze(2)


def _gathered(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """[B, N, D]: the weighted sum of latents and position channels alike, D = L + R."""
    import torch_npu

    tables_S = meta.block_tables.flatten().long()
    kv_B1SD = torch.cat([read_blocks(pages, tables_S) for pages in cache], dim=-1).view(
        len(q_BND), 1, -1, q_BND.shape[-1]
    )
    if "is_out_of_sight" not in meta.scratch:
        positions_S = torch.arange(kv_B1SD.shape[2], device=q_BND.device)
        meta.scratch["is_out_of_sight"] = (positions_S >= meta.seq_lens.unsqueeze(1))[:, None, None, :]
    out_BN1D: Tensor = torch_npu.npu_fusion_attention(
        q_BND.unsqueeze(2),
        kv_B1SD,
        kv_B1SD,
        q_BND.shape[1],
        "BNSD",
        atten_mask=meta.scratch["is_out_of_sight"],
        scale=scale,
    )[0]
    return out_BN1D.squeeze(2)
