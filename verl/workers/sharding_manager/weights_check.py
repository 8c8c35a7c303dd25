"""Whether the rollout engine holds what the trainer trains, by a digest of every tensor of every rank."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.weight_plan import Slice, slice_shape
from verl.workers.sharding_manager.transfer_plan import TransferPlan
from vllm.model_executor.model_loader.digest import WeightDigest, differences, odd_numbers

_SHOWN = 12
_SALT = 3  # beside those of the digests


class WeightsCheck:
    """Compares what the rollout engines of a group found with what its trainers expect.

    A rank puts both into one number, so that a sync in which all is well has one all-reduce of two words:

        sum_n w_n (sum_holders found_n - num_holders_n sum_ranks trained_n)  mod 2^64

    over the slices n. The w are fixed pseudo-random odd numbers: a single wrong digest never leaves it zero, several
    with a chance of 2^-49 at most. Which one is wrong is looked for when it is not zero.

    Args:
        held: what this rank's rollout engine holds of each tensor, empty where there is none.
    """

    def __init__(self, plan: TransferPlan, held: dict[str, Slice], group: dist.ProcessGroup) -> None:
        self._group = group
        self._index = {name: plan.slices[name, ranges] for name, ranges in held.items()}
        self._forms = {name: (slice_shape(ranges), plan.held_dtypes[name]) for name, ranges in held.items()}
        weights_N = odd_numbers(_SALT, len(plan.slices), torch.device("cpu"))
        self._weights_M = weights_N[torch.tensor(list(self._index.values()), dtype=torch.int64)]
        self._weights_N = weights_N * torch.from_numpy(plan.num_holders_N)

    def require_equal(self, trained_N: Tensor, found: dict[str, WeightDigest] | None) -> None:
        """RuntimeError, on every rank of the group, naming the weights in a rank's rollout engine that are not the
        trainer's.

        Args:
            trained_N: `WeightTransfer.sums_N` of this rank.
            found: digests of this rank's rollout engine, None where there is none.
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
            self._tell(trained_N, found)

    def _tell(self, trained_N: Tensor, found: dict[str, WeightDigest]) -> NoReturn:
        expected_N = trained_N.clone()
        dist.all_reduce(expected_N, group=self._group)
        values = expected_N.tolist()
        expected = {name: WeightDigest(*form, values[self._index[name]] % 2**64) for name, form in self._forms.items()}
        mine = differences(expected, found)
        of_ranks: list[tuple[int, list[str]]] = [(0, [])] * self._group.size()
        dist.all_gather_object(of_ranks, (len(mine), mine[:_SHOWN]), group=self._group)
        wrong = [(rank, count, shown) for rank, (count, shown) in enumerate(of_ranks) if count]
        rank, count, shown = wrong[0]
        lines = [*shown, *([f"and {count - _SHOWN} more"] if count > _SHOWN else [])]
        raise RuntimeError(
            f"{count} weights of rank {rank}'s rollout engine differ from the trainer's after the sync (ranks with "
            f"differences: {', '.join(str(r) for r, _, _ in wrong)}):\n" + "\n".join(f"  - {line}" for line in lines)
        )


def _signed(value: int) -> int:
    """Of 64 bits."""
    return value - 2**64 if value >= 2**63 else value
