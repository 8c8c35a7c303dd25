"""Grouped-query attention of one new token per sequence over the paged cache, as one kernel.

Limits of the paged kernel: float16 or bfloat16; a head size that is a multiple of 16 up to 512; up to 64 query heads to
a head of keys; block size a multiple of 16 up to 512. Float32 (for debugging) and other sizes gather the pages of every
sequence up to the width of the block tables and run npu_fusion_attention: B x S x G x 2 D elements beside the cache.
Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, KVCache
from vllm_ascend.ops.kv_layout import read_blocks
from vllm_ascend.ops.paged_attention import gathered_attention, paged_attention

HEAD_STEP, MAX_HEAD_SIZE, MAX_HEADS_OF_A_KEY = 16, 512, 64


def gqa_decode(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    """See ``RolloutOps.gqa_decode``."""
    heads, size = q_BND.shape[1:]
    kv_heads = cache[0].shape[2] // size
    is_paged = q_BND.dtype != torch.float32 and size % HEAD_STEP == 0 and size <= MAX_HEAD_SIZE
    if not is_paged or heads // kv_heads > MAX_HEADS_OF_A_KEY:
        return _gathered(q_BND, cache, meta, scale)
    # One query of each sequence: [B, 1, N * D] against pages [num_blocks, block_size, G * D].
    query, (k_pages, v_pages) = q_BND.reshape(len(q_BND), 1, -1), cache
    out_B1C = paged_attention(
        query, k_pages, v_pages, meta, scale, num_heads=heads, num_kv_heads=kv_heads, layout="BSH"
    )
    return out_B1C.view(q_BND.shape)


def _gathered(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    tables_S, size = meta.block_tables.flatten().long(), q_BND.shape[2]
    k_BGSD, v_BGSD = (
        read_blocks(pages, tables_S).view(len(q_BND), -1, pages.shape[2] // size, size).transpose(1, 2).contiguous()
        for pages in cache
    )
    return gathered_attention(q_BND, k_BGSD, v_BGSD, meta, scale)
