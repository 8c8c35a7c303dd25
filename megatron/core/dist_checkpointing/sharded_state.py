"""Everything of one rank that belongs in a checkpoint, as pieces of tensors that no layout changes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import Piece, Placement, global_names, place
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.parallel_layout import ParallelLayout

Placements = dict[str, Placement]  # by the name in the module


def unwrapped(model: nn.Module) -> nn.Module:
    """``model`` without its DDP wrapper."""
    return getattr(model, "module", model)


def placements(module: nn.Module, layout: ParallelLayout, rank: int) -> Placements:
    """Where every parameter and persistent buffer of ``module``, this rank's part of the model, lies in the whole."""
    at, params = layout.coords(rank), dict(module.named_parameters(remove_duplicate=False))
    state = module.state_dict()
    return {name: place(key, state[name], params.get(name), layout, at) for name, key in global_names(module).items()}


def model_pieces(module: nn.Module, placed: Placements) -> list[Piece]:
    """Parameters, frozen ones too, and persistent buffers under ``model.``; they must be on the device."""
    found: list[Piece] = []
    for name, tensor in module.state_dict().items():
        assert tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0, f"{name} is offloaded"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        where = placed[name]
        found += where.pieces(f"model.{where.key}", tensor.detach().view(-1), 0, tensor.numel())
    return found


def optimizer_pieces(optimizer: DistributedOptimizer, placed: Placements) -> list[Piece]:
    """Master weights and moments under ``optimizer.{state}.``, wherever they are."""
    found: list[Piece] = []
    for shard in optimizer.param_shards():
        where = placed[shard.name]
        assert where.local_shape == tuple(shard.shape), f"{shard.name} is {where.local_shape}, its state {shard.shape}"
        for state, flat in shard.tensors.items():
            found += where.pieces(f"optimizer.{state}.{where.key}", flat.detach(), shard.start, shard.stop)
    return found


def random_pieces(states: Mapping[str, torch.Tensor], rank: int) -> list[Piece]:
    """The states of this rank's random generators under ``rng.rank{rank}.``."""
    return [
        Piece(f"rng.rank{rank}.{name}", tuple(state.shape), (0,) * state.dim(), state) for name, state in states.items()
    ]
