"""Digests of a rank's shards, and of whole weights from the shards of all ranks of an engine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import ParallelState
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.weight_view import WeightView


@torch.no_grad()
def collect_digests(
    views: dict[str, WeightView], parallel: ParallelState, device: torch.device
) -> dict[str, WeightDigest]:
    """Hugging Face name -> digest of every tensor of the model. Collective over TP and EP.

    A rank counts its own copy of a shard that several ranks own, so a wrong copy shows on the rank that has it.
    """
    shards = dict(item for name, view in views.items() for item in view.counted_shards(name))
    mine_N3 = _rows_of(shards, device)
    is_elsewhere_N = torch.tensor([float(shard.parameter is None) for shard in shards.values()], device=device)
    values_N, counts_N = _sum_over_tp(parallel.tp.all_gather(mine_N3), parallel.tp.rank_in_group)
    parallel.ep.all_reduce(is_elsewhere_N)
    # Whole experts, each on one rank of EP; a rank's zero adds nothing.
    sums_N2 = parallel.ep.all_gather(mine_N3[:, [0, 2]]).sum(0)
    is_expert_N = is_elsewhere_N > 0
    values = torch.where(is_expert_N, sums_N2[:, 0], values_N).tolist()
    counts = torch.where(is_expert_N, sums_N2[:, 1], counts_N).tolist()
    for (name, shard), count in zip(shards.items(), counts, strict=True):
        expected = torch.Size(shard.hf_shape).numel()
        assert count == expected, f"{name}: the ranks own {count} of {expected} elements"
    return {
        name: WeightDigest(shard.hf_shape, shard.dtype, value % 2**64)
        for (name, shard), value in zip(shards.items(), values, strict=True)
    }


@torch.no_grad()
def shard_digests(views: dict[str, WeightView]) -> dict[str, WeightDigest]:
    """Hugging Face name -> digest of this rank's shard."""
    shards = dict(item for name, view in views.items() for item in view.shards(name))
    return named_digests(shards, torch.stack([shard.digest(name) for name, shard in shards.items()]))


def named_digests(shards: Mapping[str, WeightView], digests_N: Tensor) -> dict[str, WeightDigest]:
    """Hugging Face name -> shape, dtype and digest of the shard."""
    return {
        name: WeightDigest(shard.shape, shard.dtype, value % 2**64)
        for (name, shard), value in zip(shards.items(), digests_N.tolist(), strict=True)
    }


def _rows_of(shards: Mapping[str, WeightView], device: torch.device) -> Tensor:
    """int64 [N, 3]: digest, index of the first element in the flattened tensor (-1 for none), number of elements."""
    digests_N = torch.zeros(len(shards), dtype=torch.int64, device=device)
    places = [(-1, 0)] * len(shards)
    for index, (name, shard) in enumerate(shards.items()):
        count = torch.Size(shard.shape).numel()
        if count:
            digests_N[index] = shard.digest(name)
            places[index] = int(np.ravel_multi_index(shard.starts, shard.hf_shape)), count
    return torch.cat((digests_N[:, None], torch.tensor(places, device=device)), dim=1)


def _sum_over_tp(gathered_GN3: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """int64 [N] sums of digests and of element counts over the distinct shards of the group, this rank's copy first."""
    order = [rank, *(r for r in range(len(gathered_GN3)) if r != rank)]
    values_N, counts_N = torch.zeros_like(gathered_GN3[0, :, 0]), torch.zeros_like(gathered_GN3[0, :, 0])
    for position, r in enumerate(order):
        digest_N, first_N, count_N = gathered_GN3[r].unbind(1)
        is_new_N = first_N >= 0
        for earlier in order[:position]:
            is_new_N &= gathered_GN3[earlier, :, 1] != first_N
        values_N += digest_N * is_new_N
        counts_N += count_N * is_new_N
    return values_N, counts_N
