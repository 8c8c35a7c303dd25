"""Copies the weights of a policy version from the ranks that train to the ranks that generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.trained_weights import TrainedWeights
from verl.workers.sharding_manager.transfer_plan import TransferPlan, build_plan
from verl.workers.sharding_manager.weight_transfer import WeightTransfer
from verl.workers.sharding_manager.weights_check import WeightsCheck
from vllm.model_executor.model_loader.rank_shards import RankShards


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
    def run(self, params: Mapping[str, Tensor], rollout: BaseRollout | None, version: int) -> None:
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
