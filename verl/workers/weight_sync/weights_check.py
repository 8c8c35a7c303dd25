"""After a sync: do the rollout engines hold what the trainers sent?"""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.workers.weight_sync.plan import TransferPlan
from vllm.model_executor.model_loader.digest import WeightDigest, differences, odd_numbers
from vllm.model_executor.model_loader.rank_shards import RankShards

MAX_RANKS = 1 << 15  # whose sums of 16 bits fit int32
_SHOWN = 12
_SALT = 3  # differs from the salts of the digests


class WeightsCheck:
    """Compares the digests of a group's rollout engines with those of its trainers.

    A rank adds both up to one number, so that a successful sync has one all-reduce of two numbers:

        sum_n w_n (sum_destinations found_n - num_destinations_n sum_ranks trained_n)  mod 2^64

    over the N distinct shards. The w are fixed pseudo-random odd numbers: the sum is never zero with one wrong digest,
    and with several wrong ones it is zero with a probability of at most 2^-49. Only a sum that is not zero makes the
    ranks look for the shards that are wrong.

    Args:
        shards: this rank's M rollout shards, empty where there is no engine.
    """

    def __init__(self, plan: TransferPlan, shards: RankShards, group: dist.ProcessGroup) -> None:
        self._group = group
        self._index = {name: plan.shard_number(name, shard.ranges) for name, shard in shards.items()}
        self._forms = {name: (shard.shape, shard.dtype) for name, shard in shards.items()}
        weights_N = odd_numbers(_SALT, len(plan.num_destinations_N), torch.device("cpu"))
        self._weights_M = weights_N[torch.tensor(list(self._index.values()), dtype=torch.int64)]
        self._weights_N = weights_N * torch.from_numpy(plan.num_destinations_N)

    def require_equal(self, trained_N: Tensor, found: dict[str, WeightDigest] | None) -> None:
        """RuntimeError, on every rank of the group, naming the weights in a rank's rollout engine that are not the
        trainer's.

        Args:
            trained_N: `WeightSync.sums_N` of this rank.
            found: digests of this rank's rollout engine, None where there is no engine.
        """
        found = found or {}
        is_wrong = {name: (digest.shape, digest.dtype) for name, digest in found.items()} != self._forms
        mine = -(trained_N.cpu() * self._weights_N).sum()
        if not is_wrong:
            values = np.array([found[name].value for name in self._forms], dtype=np.uint64).view(np.int64)
            mine += (torch.from_numpy(values) * self._weights_M).sum()
        both = torch.stack((mine, torch.tensor(int(is_wrong))))
        if any(self._sum_over_ranks(both, trained_N.device)):
            self._raise_differences(trained_N, found)

    def _sum_over_ranks(self, mine_N: Tensor, device: torch.device) -> list[int]:
        """Sums mod 2^64 of what every rank has on its host, int64 [N].

        They travel in four int32 of 16 bits each: not every device's collectives add 64-bit numbers.
        """
        assert self._group.size() <= MAX_RANKS, self._group.size()
        quarters_N4 = mine_N.numpy().view(np.uint16).astype(np.int32).reshape(-1, 4)
        sums_N4 = torch.from_numpy(quarters_N4).to(device)
        dist.all_reduce(sums_N4, group=self._group)
        return [sum(quarter << 16 * place for place, quarter in enumerate(row)) % 2**64 for row in sums_N4.tolist()]

    def _raise_differences(self, trained_N: Tensor, found: dict[str, WeightDigest]) -> NoReturn:
        values = self._sum_over_ranks(trained_N.cpu(), trained_N.device)
        expected = {name: WeightDigest(*form, values[self._index[name]]) for name, form in self._forms.items()}
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
