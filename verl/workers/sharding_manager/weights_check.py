"""Checks by a digest of every shard that the rollout engines have the trainer's weights."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.ranges import Ranges, shape_of
from verl.workers.sharding_manager.transfer_plan import TransferPlan
from vllm.model_executor.model_loader.digest import WeightDigest, differences, odd_numbers

_SHOWN = 12
_SALT = 3  # differs from the salts of the digests


class WeightsCheck:
    """Compares the digests of a group's rollout engines with those of its trainers.

    A rank adds both up to one number, so that a successful sync has one all-reduce of two words:

        sum_n w_n (sum_destinations found_n - num_destinations_n sum_ranks trained_n)  mod 2^64

    over the N distinct shards. The w are fixed pseudo-random odd numbers: the sum is never zero with one wrong digest,
    and with several wrong ones it is zero with a probability of at most 2^-49. Only a sum that is not zero makes the
    ranks look for the shards that are wrong.

    Args:
        shards: the ranges of this rank's M rollout shards by name, empty where there is no engine.
    """

    def __init__(self, plan: TransferPlan, shards: dict[str, Ranges], group: dist.ProcessGroup) -> None:
        self._group = group
        self._index = {name: plan.shard_index[name, ranges] for name, ranges in shards.items()}
        self._forms = {name: (shape_of(ranges), plan.rollout_dtypes[name]) for name, ranges in shards.items()}
        weights_N = odd_numbers(_SALT, len(plan.shard_index), torch.device("cpu"))
        self._weights_M = weights_N[torch.tensor(list(self._index.values()), dtype=torch.int64)]
        self._weights_N = weights_N * torch.from_numpy(plan.num_destinations_N)

    def require_equal(self, trained_N: Tensor, found: dict[str, WeightDigest] | None) -> None:
        """RuntimeError, on every rank of the group, naming the weights in a rank's rollout engine that are not the
        trainer's.

        Args:
            trained_N: `WeightTransfer.sums_N` of this rank.
            found: digests of this rank's rollout engine, None where there is no engine.
        """
        found = found or {}
        is_wrong = {name: (digest.shape, digest.dtype) for name, digest in found.items()} != self._forms
        mine = -(trained_N.cpu() * self._weights_N).sum()
        if not is_wrong:
            values = [_signed(found[name].value) for name in self._forms]
            mine += (torch.tensor(values, dtype=torch.int64) * self._weights_M).sum()
        both = torch.stack((mine, torch.tensor(int(is_wrong)))).to(trained_N.device)
        dist.all_reduce(both, group=self._group)
        if both.any():
            self._raise_differences(trained_N, found)

    def _raise_differences(self, trained_N: Tensor, found: dict[str, WeightDigest]) -> NoReturn:
        expected_N = trained_N.clone()
        dist.all_reduce(expected_N, group=self._group)
        values = expected_N.tolist()
        expected = {name: WeightDigest(*form, values[self._index[name]] % 2**64) for name, form in self._forms.items()}
        mine = differences(expected, found)
        by_rank: list[tuple[int, list[str]]] = [(0, [])] * self._group.size()
        dist.all_gather_object(by_rank, (len(mine), mine[:_SHOWN]), group=self._group)
        wrong = [(rank, count, shown) for rank, (count, shown) in enumerate(by_rank) if count]
        rank, count, shown = wrong[0]
        lines = [*shown, *([f"and {count - _SHOWN} more"] if count > _SHOWN else [])]
        raise RuntimeError(
            f"{count} weights of rank {rank}'s rollout engine differ from the trainer's after the sync (ranks with "
            f"differences: {', '.join(str(r) for r, _, _ in wrong)}):\n" + "\n".join(f"  - {line}" for line in lines)
        )


def _signed(value: int) -> int:
    """An unsigned 64-bit number as a signed one."""
    return value - 2**64 if value >= 2**63 else value
