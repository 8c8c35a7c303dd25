"""The shards of everything that a rank saves: model, optimizer state and random states."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor, global_names, placement_of
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.optimizer import DistributedOptimizer


def training_shards(model: nn.Module, optimizer: DistributedOptimizer | None, ranks: Ranks) -> list[ShardedTensor]:
    """The model's shards (also of frozen parameters) under ``model.``, and the optimizer's.

    Parameters and persistent buffers must be on the device. Master weights and moments, on whatever device they are,
    have the prefix ``optimizer.{state}.``. ``model`` may be wrapped in DDP.
    """
    module: nn.Module = getattr(model, "module", model)
    state, params = module.state_dict(), dict(module.named_parameters(remove_duplicate=False))
    coords = ranks.layout.coords(ranks.rank)
    placements = {
        name: placement_of(key, state[name], params.get(name), ranks.layout, coords)
        for name, key in global_names(module).items()
    }
    found: list[ShardedTensor] = []
    for name, tensor in state.items():
        assert tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0, f"{name} is offloaded"
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        placement = placements[name]
        found += placement.shards(f"model.{placement.key}", tensor.detach().view(-1), 0, tensor.numel())
    for part in () if optimizer is None else optimizer.param_shards():
        placement = placements[part.name]
        shape = placement.local_shape
        assert shape == tuple(part.shape), f"{part.name} is {shape}, its state {part.shape}"
        for kind, flat in part.tensors.items():
            found += placement.shards(f"optimizer.{kind}.{placement.key}", flat.detach(), part.start, part.stop)
    return found


def random_state_shards(states: Mapping[str, Tensor], rank: int) -> list[ShardedTensor]:
    """The states of this rank's random generators under ``rng.rank{rank}.``."""
    return [
        ShardedTensor(f"rng.rank{rank}.{name}", tuple(state.shape), (0,) * state.dim(), state)
        for name, state in states.items()
    ]
