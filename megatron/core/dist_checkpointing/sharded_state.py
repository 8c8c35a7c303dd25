"""The shards of everything that a rank saves: model, optimizer state and random states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import Placement, Shard, global_names, placement_of
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.parallel_layout import ParallelLayout

Placements = dict[str, Placement]  # by the name in the module


def unwrapped(model: nn.Module) -> nn.Module:
    """``model`` without its DDP wrapper."""
    return getattr(model, "module", model)


def placements(module: nn.Module, layout: ParallelLayout, rank: int) -> Placements:
    """The placement of every parameter and persistent buffer of ``module``, this rank's part of the model."""
    coords, params = layout.coords(rank), dict(module.named_parameters(remove_duplicate=False))
    state = module.state_dict()
    return {
        name: placement_of(key, state[name], params.get(name), layout, coords)
        for name, key in global_names(module).items()
    }


def model_shards(module: nn.Module, placed: Placements) -> list[Shard]:
    """Parameters (also frozen ones) and persistent buffers under ``model.``; they must be on the device."""
    found: list[Shard] = []
    for name, tensor in module.state_dict().items():
        assert tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0, f"{name} is offloaded"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        placement = placed[name]
        found += placement.shards(f"model.{placement.key}", tensor.detach().view(-1), 0, tensor.numel())
    return found


def optimizer_shards(optimizer: DistributedOptimizer, placed: Placements) -> list[Shard]:
    """Master weights and moments under ``optimizer.{state}.``, on whatever device they are."""
    found: list[Shard] = []
    for part in optimizer.param_shards():
        placement = placed[part.name]
        shape = placement.local_shape
        assert shape == tuple(part.shape), f"{part.name} is {shape}, its state {part.shape}"
        for state, flat in part.tensors.items():
            found += placement.shards(f"optimizer.{state}.{placement.key}", flat.detach(), part.start, part.stop)
    return found


def random_state_shards(states: Mapping[str, torch.Tensor], rank: int) -> list[Shard]:
    """The states of this rank's random generators under ``rng.rank{rank}.``."""
    return [
        Shard(f"rng.rank{rank}.{name}", tuple(state.shape), (0,) * state.dim(), state) for name, state in states.items()
    ]
