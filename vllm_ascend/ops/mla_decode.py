"""Absorbed MLA attention of one new token per sequence over the paged cache, as one kernel.

Limits of the paged kernel: float16 or bfloat16; DeepSeek's sizes (latent 512, rope 64); 1 to 128 heads, a power of two,
before CANN 8.3 32, 64 or 128; block size a multiple of 16 up to 512; pages in nz with queries as BSND only. Float32
(for debugging) and other sizes gather the pages of every sequence up to the width of the block tables and run
npu_fusion_attention, which takes head sizes up to 768: B x S x (L + R) elements beside the cache. Tolerance: 1e-2
(bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache, Queries
from vllm.transformers_utils.config import HFConfig
from vllm_ascend.ops.kv_layout import is_nz, read_blocks
from vllm_ascend.ops.paged_attention import gathered_attention, paged_attention
from vllm_ascend.versions import cann_version, numbers

PAGED_LATENT, PAGED_ROPE = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
ALL_HEADS_FROM, HEADS_BEFORE = "8.3", (32, 64, 128)  # of CANN
BLOCK_STEP, MAX_BLOCK = 16, 512


def mla_decode(q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """See ``RolloutOps.mla_decode``."""
    q_latent_BNL, q_rope_BNR = q
    if _is_paged(q_latent_BNL.shape[-1], q_rope_BNR.shape[-1], q_latent_BNL.dtype != torch.float32):
        return _paged(q, cache, meta, scale)
    return _gathered(torch.cat(q, dim=-1), cache, meta, scale)[..., : q_latent_BNL.shape[-1]]


def head_problem(heads: int, hf: HFConfig, dtype: str) -> str | None:
    """Why the paged kernel cannot take a rank's `heads`, None when it can or is not used."""
    if not hf.is_mla:
        return None
    if not _is_paged(hf.kv_lora_rank, hf.qk_rope_head_dim, dtype != "float32"):
        return None
    version = cann_version() or ALL_HEADS_FROM
    is_old = numbers(version) < numbers(ALL_HEADS_FROM)
    if heads in (HEADS_BEFORE if is_old else HEADS):
        return None
    kernel, remedy = "on npu", "choose another tensor_parallel_size"
    if is_old:
        kernel, remedy = f"of CANN {version}", f"{remedy}, or CANN {ALL_HEADS_FROM} or newer, which takes {list(HEADS)}"
    return (
        f"num_attention_heads={hf.num_attention_heads} leaves {heads} heads to a rank, but the decode kernel {kernel} "
        f"takes {list(HEADS_BEFORE if is_old else HEADS)}; {remedy}"
    )


def _is_paged(latent: int, rope: int, is_half_precision: bool) -> bool:
    return is_half_precision and (latent, rope) == (PAGED_LATENT, PAGED_ROPE)


def _paged(q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    # One query of each sequence and one KV head. Pages [num_blocks, 1, block_size, C] take queries as [B, N, 1, C], and
    # pages of fractals [num_blocks, 1, C/16, block_size, 16] as [B, 1, N, C].
    (q_latent_BNL, q_rope_BNR), (latent_pages, rope_pages) = q, (pages.unsqueeze(1) for pages in cache)
    layout, query_dim = ("BSND", 1) if is_nz(cache[0]) else ("BNSD", 2)
    out = paged_attention(
        q_latent_BNL.unsqueeze(query_dim).contiguous(),
        latent_pages,
        latent_pages,
        meta,
        scale,
        num_heads=q_latent_BNL.shape[1],
        num_kv_heads=1,
        layout=layout,
        query_rope=q_rope_BNR.unsqueeze(query_dim).contiguous(),
        key_rope=rope_pages,
    )
    return out.squeeze(query_dim)


def _gathered(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """[B, N, D]: the weighted sum of latents and position channels alike, D = L + R."""
    tables_S = meta.block_tables.flatten().long()
    kv_B1SD = torch.cat([read_blocks(pages, tables_S) for pages in cache], dim=-1).view(
        len(q_BND), 1, -1, q_BND.shape[-1]
    )
    return gathered_attention(q_BND, kv_B1SD, kv_B1SD, meta, scale)
