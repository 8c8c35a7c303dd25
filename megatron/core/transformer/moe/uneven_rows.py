"""Rows gathered from and summed back to ranks that hold different numbers of them, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import map_over_group


def gather_rows(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """x [sizes[rank], ...] of every rank -> [sum(sizes), ...] in rank order; the gradient is summed over the group."""
    return map_over_group(x, group, partial(_gather, sizes=sizes), partial(_reduce_scatter, sizes=sizes))


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """x [sum(sizes), ...] of every rank -> this rank's [sizes[rank], ...] of the sum; transpose of ``gather_rows``."""
    return map_over_group(x, group, partial(_reduce_scatter, sizes=sizes), partial(_gather, sizes=sizes))


def _gather(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """The collective takes the same number of rows from every rank: shorter inputs are padded."""
    most = max(sizes)
    assert x.shape[0] == sizes[group.rank()], f"{x.shape[0]} rows where {sizes[group.rank()]} were announced"
    if most == 0:
        return x
    if x.shape[0] < most:
        x = torch.cat([x, x.new_zeros(most - x.shape[0], *x.shape[1:])])
    gathered, _ = collectives.all_gather(x, group)
    if min(sizes) == most:
        return gathered
    return torch.cat([part[:size] for part, size in zip(gathered.split(most), sizes, strict=True)])


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    most = max(sizes)
    if most == 0:
        return x
    if min(sizes) < most:
        padded = x.new_zeros(len(sizes), most, *x.shape[1:])
        for part, rows, size in zip(padded, x.split(sizes), sizes, strict=True):
            part[:size] = rows
        x = padded.flatten(0, 1)
    return collectives.reduce_scatter(x, group)[0][: sizes[group.rank()]]
