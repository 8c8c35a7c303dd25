"""The two functions of FlashMLA that the rollout engine calls, in plain torch, for a machine without a GPU.

Signatures, shapes and limits follow the README and the docstrings of https://github.com/deepseek-ai/FlashMLA. How the
sequences are split is planned for given lengths, and the answer for others is wrong here as it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE, KEY_WIDTH, VALUE_WIDTH = 64, 576, 512


class FlashMLASchedMeta:
    """Made empty; the first call plans with its lengths."""

    planned_lens_B: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """The form of today, whose arguments are for programs of the first one."""
    return FlashMLASchedMeta(), None


def get_mla_metadata_of_2025(
    cache_seqlens: Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[Tensor, Tensor]:
    """The first form, which plans at once: what the kernel gets, and bounds of the splits [B + 1]."""
    assert cache_seqlens.dtype is torch.int32 and cache_seqlens.is_contiguous() and num_heads_k == 1
    return cache_seqlens.clone(), cache_seqlens.new_zeros(len(cache_seqlens) + 1)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """-> out [B, S, N, 512], log-sum-exp float32 [B, N, S] of q [B, S, N, 576] over k_cache [blocks, 64, 1, 576]."""
    assert q.shape[1] == 1 and q.shape[3] == KEY_WIDTH and head_dim_v == VALUE_WIDTH
    assert k_cache.shape[1:] == (BLOCK_SIZE, 1, KEY_WIDTH) and {q.dtype, k_cache.dtype} == {torch.bfloat16}
    assert q.is_contiguous() and {block_table.dtype, cache_seqlens.dtype} == {torch.int32}
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        assert num_splits is None
        if tile_scheduler_metadata.planned_lens_B is None:
            tile_scheduler_metadata.planned_lens_B = cache_seqlens.clone()
        lens_B = tile_scheduler_metadata.planned_lens_B
    else:
        lens_B = tile_scheduler_metadata
    k_BSD = k_cache[block_table.long()].flatten(1, 3).float()
    scores_BNS = torch.einsum("bnd,bsd->bns", q[:, 0].float(), k_BSD) * (softmax_scale or KEY_WIDTH**-0.5)
    is_past_BS = torch.arange(k_BSD.shape[1], device=q.device) >= lens_B[:, None]
    scores_BNS = scores_BNS.masked_fill(is_past_BS[:, None], float("-inf"))
    out_BNV = scores_BNS.softmax(-1) @ k_BSD[..., :VALUE_WIDTH]
    return out_BNV.to(q.dtype).unsqueeze(1), scores_BNS.logsumexp(-1).unsqueeze(2)
