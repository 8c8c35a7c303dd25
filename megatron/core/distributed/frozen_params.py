"""Frozen parameters: one flat tensor without gradients, which is offloaded with the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed.offload import OffloadableTensor
from megatron.core.distributed.param_and_grad_buffer import assign_ranges, move_into


class FrozenParams:
    """Makes ``params`` (of one dtype) views of one flat tensor; the optimizer never sees them."""

    def __init__(self, name: str, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.name = name
        self.param_ranges, numel = assign_ranges(params)
        first = params[0][1]
        self.params = OffloadableTensor(torch.zeros(numel, dtype=first.dtype, device=first.device))
        move_into(self.params.tensor, params, self.param_ranges)


def frozen_params(params: Sequence[tuple[str, nn.Parameter]]) -> list[FrozenParams]:
    """One ``FrozenParams`` for each dtype among those of ``params`` that take no gradient."""
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        if not param.requires_grad:
            by_dtype.setdefault(param.dtype, []).append((name, param))
    return [FrozenParams(f"frozen_{str(dtype).removeprefix('torch.')}", of) for dtype, of in by_dtype.items()]
