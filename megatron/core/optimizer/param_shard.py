"""Optimizer state by parameter, as checkpoints save and load it, independent of the buffers that store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron.core.distributed import ParamAndGradBuffer


@dataclass(frozen=True)
class ParamShard:
    """Elements [start, stop) of one flattened local parameter and their optimizer state.

    name: the parameter's name in ``named_parameters`` of the wrapped module · shape: shape of the local parameter ·
    tensors: flat views [stop - start] of the state itself (of the host's copy while offloaded) by "master", "exp_avg"
    and "exp_avg_sq"; a save reads them, a load writes them in place.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    is_expert: bool
    tensors: dict[str, torch.Tensor]


def param_shards_of(
    buffer: ParamAndGradBuffer, first: int, tensors: Mapping[str, torch.Tensor]
) -> Iterator[ParamShard]:
    """The shard of each parameter in ``tensors``, the state of ``buffer`` from its element ``first`` on; no padding."""
    last = first + next(iter(tensors.values())).numel()
    for name, (param_start, param_stop) in buffer.param_ranges.items():
        start, stop = max(param_start, first), min(param_stop, last)
        if start < stop:
            yield ParamShard(
                name=name,
                shape=buffer.param_shapes[name],
                start=start - param_start,
                stop=stop - param_start,
                is_expert=buffer.is_expert,
                tensors={key: tensor[start - first : stop - first] for key, tensor in tensors.items()},
            )
