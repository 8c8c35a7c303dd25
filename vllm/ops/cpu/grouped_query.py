"""Grouped-query attention on a CPU. A prompt's tokens go through the same sums as decoded ones, bit for bit.

Letters: see vllm/ops/contract.py; C channels of a head as they lie in the cache, whole vectors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.contract import Angles, DecodeMetadata, HeadNorms, KVCache, PrefillMetadata
from vllm.ops.cpu.calls import KernelCalls
from vllm.utils import last_contiguous

_LANES = 16  # as in csrc/vec.h
_MOST_CHANNELS, _MOST_SHARING = 256, 64  # of a head, and query heads of a group, as in csrc/grouped_query.h


def new_gqa_cache(
    num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """One tensor [num_blocks, keys and values, G, block_size, C]; csrc/grouped_query.h says how a head's block lies."""
    if head_dim > _MOST_CHANNELS:
        raise ValueError(
            f"head_dim={head_dim}: the CPU kernels of grouped-query attention hold heads of up to {_MOST_CHANNELS} "
            "channels; set rollout_ops='vllm.ops.reference:rollout_ops'"
        )
    channels = -(-head_dim // _LANES) * _LANES
    return (torch.zeros(num_blocks, 2, heads, block_size, channels, dtype=dtype, device=device),)


class GroupedQueryOps:
    """See ``RolloutOps.rope_write_gqa``, ``gqa_decode`` and ``gqa_prefill``."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def rope_write_gqa(
        self,
        cache: KVCache,
        qkv_TMD: Tensor,
        bias_MD: Tensor | None,
        norms: HeadNorms | None,
        angles: Angles,
        slots_T: Tensor,
    ) -> Tensor:
        (pages,) = cache
        _, _, kv_heads, block_size, padded = pages.shape
        tokens, all_heads, channels = qkv_TMD.shape
        if qkv_TMD.stride()[1:] != (channels, 1):
            qkv_TMD = qkv_TMD.contiguous()
        others = [] if norms is None else [norms.q_weight_D, norms.k_weight_D]
        mode = self._calls.mode(qkv_TMD, pages, *others, *([] if bias_MD is None else [bias_MD]))
        heads = all_heads - 2 * kv_heads
        q_TND = self._calls.empty(qkv_TMD, tokens, heads, channels)
        sizes = tokens, heads, kv_heads, channels, padded, block_size
        weights = (None, None, 0.0) if norms is None else (norms.q_weight_D, norms.k_weight_D, float(norms.eps))
        added = None if bias_MD is None else bias_MD.contiguous()
        turns = *(part_TR.contiguous() for part_TR in angles), angles[0].shape[1]
        qkv = pages, qkv_TMD, qkv_TMD.stride(0)
        self._calls.run("cpu_rope_write_gqa", mode, *qkv, *sizes, added, *weights, *turns, slots_T, q_TND)
        return q_TND

    def gqa_decode(self, q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
        return self._attend(q_BND, cache, meta.block_tables, None, meta.seq_lens_host, scale)

    def gqa_prefill(self, q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        return self._attend(q_TND, cache, meta.block_tables, meta.query_lens_host, meta.seq_lens_host, scale)

    def _attend(
        self,
        q_TND: Tensor,
        cache: KVCache,
        tables_BW: Tensor,
        query_lens_B: np.ndarray | None,
        seq_lens_B: np.ndarray,
        scale: float,
    ) -> Tensor:
        (pages,) = cache
        q_TND = last_contiguous(q_TND)
        heads, channels = q_TND.shape[1:]
        _, _, kv_heads, block_size, padded = pages.shape
        assert heads % kv_heads == 0 and heads // kv_heads <= _MOST_SHARING, (heads, kv_heads)
        out_TND = self._calls.empty(q_TND, *q_TND.shape)
        q = q_TND, *q_TND.stride()[:2], len(seq_lens_B), heads
        cached = pages, tables_BW, query_lens_B, seq_lens_B, tables_BW.stride(0), block_size, kv_heads, channels, padded
        self._calls.run("cpu_gqa_attention", self._calls.mode(q_TND, pages), *q, *cached, scale, out_TND)
        return out_TND
