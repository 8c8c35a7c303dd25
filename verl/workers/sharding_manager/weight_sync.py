"""One policy version from the ranks that train to the ranks that generate, the same ranks or others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager.trained_weights import TrainedWeights
from verl.workers.sharding_manager.transfer import WeightTransfer
from verl.workers.sharding_manager.transfer_plan import TransferPlan, build_plan
from verl.workers.sharding_manager.weights_check import WeightsCheck
from vllm.model_executor.model_loader.held_slices import HeldSlice


class WeightSync:
    """Sends the weights by a plan that is made once, and checks every tensor of every rollout engine afterwards.

    Args:
        params_dtype: of the training weights.
        holdings: rank of `group` -> what the rollout engine there holds (`held_slices`), the same on every rank. The
            first ``layout.world_size`` ranks of the group train.
        group: all ranks that train or generate; every one of them makes this object and calls ``run``.
        bucket_bytes: of a rank's buffers for one round; two are in memory at most.
        ranks_per_node: neighbours that are asked for weights first.
        build_plan: `build_plan`, or what knows the plan of these arguments already: it is the same on all ranks.
    """

    def __init__(
        self,
        hf: HFModelConfig,
        layout: ParallelLayout,
        params_dtype: torch.dtype,
        holdings: Mapping[int, Mapping[str, HeldSlice]],
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
            holdings,
            group.size(),
            bucket_bytes=bucket_bytes,
            ranks_per_node=ranks_per_node,
        )
        self.transfer = WeightTransfer(self.plan, group, device)
        held = {name: slice_.ranges for name, slice_ in holdings.get(group.rank(), {}).items()}
        self.check = WeightsCheck(self.plan, held, group)
        self._has_run = False

    @torch.no_grad()
    def run(self, params: Mapping[str, Tensor], rollout: BaseRollout | None, version: int) -> None:
        """Collective over the group. RuntimeError on every rank, naming the tensors, when an engine holds other bits.

        A tensor's digest is taken when its last slice is in place; after the first run all are read once more, so that
        a tensor whose place another one shares is found.

        Args:
            params: this rank's training tensors under the training engine's names, empty where nothing is trained.
            rollout: this rank's engine with its weights awake, None where there is none.
        """
        slices = self.transfer.slices(TrainedWeights(params, self.plan, self.group, self.device))
        found = None
        if rollout is None:
            assert not list(slices), "slices for a rank without an engine"
        else:
            found = rollout.update_weight_slices(slices, version)
            if not self._has_run:
                found = rollout.held_digests()
        self.check.require_equal(self.transfer.sums_N, found)
        self._has_run = True
