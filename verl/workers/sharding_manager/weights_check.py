"""Whether the rollout engine holds what the trainer trains, by a digest of every tensor of every rank."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.weight_plan import Slice, slice_shape
from verl.workers.sharding_manager.transfer_plan import TransferPlan
from vllm.model_executor.model_loader.digest import WeightDigest, differences

_SHOWN = 12


class WeightsCheck:
    """Compares what the rollout engines of a group found with what its trainers expect.

    Every rank adds up a share of the slices: the ranks' parts of what is expected of each, and what its holders found.
    Two exchanges of all with all, which on hosts take a third of an all-reduce's time.

    Args:
        held: what this rank's rollout engine holds of each tensor, empty where there is none.
    """

    def __init__(self, plan: TransferPlan, held: dict[str, Slice], group: dist.ProcessGroup) -> None:
        self._group, num_slices = group, len(plan.slices)
        self._index = {name: plan.slices[name, ranges] for name, ranges in held.items()}
        self._forms = {name: (slice_shape(ranges), plan.held_dtypes[name]) for name, ranges in held.items()}
        self._share = -(-num_slices // group.size())
        slices_N = torch.arange(num_slices)
        # Of what is expected, in [ranks, 2, share]; what was found lies a share behind.
        self._places_N = slices_N + slices_N // self._share * self._share
        self._found_M = self._places_N[torch.tensor(list(self._index.values()), dtype=torch.int64)] + self._share
        holders = torch.zeros(group.size() * self._share, dtype=torch.int64)
        holders[:num_slices] = torch.from_numpy(plan.num_holders_N)
        self._num_holders_S = holders.view(group.size(), -1)[group.rank()]

    def require_equal(self, trained_N: Tensor, found: dict[str, WeightDigest] | None) -> None:
        """RuntimeError, on every rank of the group, naming the weights in a rank's rollout engine that are not the
        trainer's.

        Args:
            trained_N: `WeightTransfer.sums_N` of this rank.
            found: digests of this rank's rollout engine, None where there is none.
        """
        found, num_ranks = found or {}, self._group.size()
        is_wrong = {name: (digest.shape, digest.dtype) for name, digest in found.items()} != self._forms
        both_R2S = torch.zeros(num_ranks, 2, self._share, dtype=torch.int64)
        both_R2S.view(-1)[self._places_N] = trained_N.cpu()
        if not is_wrong:
            values = [_signed(found[name].value) for name in self._forms]
            both_R2S.view(-1)[self._found_M] = torch.tensor(values, dtype=torch.int64)
        expected_S, found_S = self._exchanged(both_R2S.to(trained_N.device)).sum(0)
        is_wrong = is_wrong or not torch.equal(found_S, expected_S * self._num_holders_S)
        if bool(self._exchanged(trained_N.new_full((num_ranks,), int(is_wrong))).any()):
            self._tell(trained_N, found)

    def _exchanged(self, to_ranks: Tensor) -> Tensor:
        """Row i is of rank i, which sent it as its row of this rank; on the host."""
        arrived = torch.empty_like(to_ranks)
        dist.all_to_all_single(arrived.view(torch.uint8), to_ranks.view(torch.uint8), group=self._group)
        return arrived.cpu()

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
