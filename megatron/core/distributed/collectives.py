"""Reduce-scatter and all-gather of one flat buffer, in place, under the names that torch 2.5 and later have."""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch 2.13 renames these two and warns about the old names, which are all that torch 2.5 (Ascend) has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_in_place(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``flat`` over ``group`` into ``shard``, this rank's part of it; the other parts become garbage."""
    _reduce_scatter(shard, flat, group=group)


def all_gather_in_place(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill every other rank's part of ``flat`` from its owner; ``shard`` is this rank's part of ``flat``."""
    _all_gather(flat, shard, group=group)
