"""Copies the weights of a policy version from the ranks that train to the ranks that generate, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.ranges import Ranges, shape_of
from megatron.core.parallel_layout import ParallelLayout
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.sharding_manager.trained_weights import TrainedWeights
from verl.workers.sharding_manager.transfer_plan import TransferPlan, build_plan
from verl.workers.sharding_manager.weight_transfer import WeightTransfer
from vllm.model_executor.model_loader.digest import WeightDigest, differences, odd_numbers
from vllm.model_executor.model_loader.rank_shards import RankShards

MAX_RANKS = 1 << 15  # whose sums of 16 bits fit int32
_SHOWN = 12
_SALT = 3  # differs from the salts of the digests


class WeightSync:
    """Sends the weights by a plan that is made once, and then checks every tensor of every rollout engine.

    Args:
        params_dtype: the dtype of the training weights.
        rollout_shards: rank of `group` -> `rank_shards` of the rollout engine there, the same on every rank. The first
            ``layout.world_size`` ranks of the group train.
        group: all ranks that train or generate; every one of them makes this object and calls ``run``.
        bucket_bytes: the size of a rank's buffers for one round; at most two rounds are in memory.
        ranks_per_node: ranks on the same node are the preferred sources.
        build_plan: `build_plan`, or a function that returns an earlier plan of the same arguments.
    """

    def __init__(
        self,
        hf: HFModelConfig,
        layout: ParallelLayout,
        params_dtype: torch.dtype,
        rollout_shards: Mapping[int, RankShards],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        bucket_bytes: int,
        ranks_per_node: int,
        build_plan: Callable[..., TransferPlan] = build_plan,
    ) -> None:
        self.group, self.device = group, device
        self.plan = build_plan(
            hf,
            layout,
            params_dtype,
            rollout_shards,
            group.size(),
            bucket_bytes=bucket_bytes,
            ranks_per_node=ranks_per_node,
        )
        self.transfer = WeightTransfer(self.plan, group, device)
        mine = {name: shard.ranges for name, shard in rollout_shards.get(group.rank(), {}).items()}
        self.check = WeightsCheck(self.plan, mine, group)
        self._has_run = False

    @torch.no_grad()
    def run(self, params: Mapping[str, Tensor], rollout: vLLMRollout | None, version: int) -> None:
        """Collective over the group. RuntimeError on every rank, naming the tensors, when an engine has other bits.

        The digest of a shard is taken while it is written; after the first run all shards are read once more, so that
        two tensors that share memory by mistake are found.

        Args:
            params: this rank's training tensors under the training engine's names, empty where nothing is trained.
            rollout: this rank's engine with its weights awake, None where there is none.
        """
        updates = self.transfer.updates(TrainedWeights(params, self.plan, self.group, self.device))
        found = None
        if rollout is None:
            assert not list(updates), "updates for a rank without an engine"
        else:
            found = rollout.update_weight_shards(updates, version)
            if not self._has_run:
                found = rollout.shard_digests()
        self.check.require_equal(self.transfer.sums_N, found)
        self._has_run = True


class WeightsCheck:
    """Compares the digests of a group's rollout engines with those of its trainers.

    A rank adds both up to one number, so that a successful sync has one all-reduce of two numbers:

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
