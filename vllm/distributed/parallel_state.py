"""The process groups of one engine, built once into one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vllm.config import ParallelConfig
from vllm.utils import async_tensor_h2d

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
GROUP_PREFIX = "rollout_"  # of the groups' names: training has groups called tp and dp, too
GroupOptions = Callable[[str], Any]

# torch 2.13 warns about the old names, 2.5 has only those.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class GroupCoordinator:
    """A group of ranks and this rank's index in it; `group` is None for a group of one rank, which sends nothing."""

    rank_in_group: int
    world_size: int
    group: dist.ProcessGroup | None
    has_reduce_scatter: bool = True  # see ``Platform.has_reduce_scatter``

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the group in place."""
        if self.group is not None and x.numel() > 0:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[G, *x.shape] of the group's tensors, which all have the same shape."""
        if self.group is None:
            return x[None]
        sent_as = x.dtype
        # NPU-ADAPTATION(int64-as-words): collectives on the vector cores take no 64-bit types, so int64 travels as two
        # words of 32 bits; drop when HCCL gathers int64 there.
        if x.dtype == torch.int64:
            sent_as = torch.int32
        # NPU-ADAPTATION END
        with torch.inference_mode(False):  # gloo of torch 2.5 writes from a thread that is in no inference mode
            gathered = x.new_empty(self.world_size, *x.shape)
            received = gathered.view(-1).view(sent_as)
        if x.numel() > 0:
            _all_gather(received, x.contiguous().view(-1).view(sent_as), group=self.group)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[n, ...] of [G n, ...]: this rank's part of the sum over the group."""
        if self.group is None:
            return x
        if not self.has_reduce_scatter:
            total, *others = self.all_to_all(x).unflatten(0, (self.world_size, -1)).unbind(0)
            for part in others:
                total = total + part
            return total
        part = x.new_empty(len(x) // self.world_size, *x.shape[1:])
        _reduce_scatter(part, x.contiguous(), group=self.group)
        return part

    def all_to_all(
        self, x: Tensor, sent_counts: list[int] | None = None, received_counts: list[int] | None = None
    ) -> Tensor:
        """The rows that the ranks of the group send here, in their order: rank r gets the next `sent_counts[r]` rows of
        x, and sends `received_counts[r]` of its own. Without counts, everyone gets as many.
        """
        if self.group is None:
            return x
        num_received = len(x) if received_counts is None else sum(received_counts)
        received = x.new_empty(num_received, *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), received_counts, sent_counts, group=self.group)
        return received

    def destroy(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)


@dataclass(frozen=True)
class StepExchange:
    """What DP replicas that share experts exchange before a step; without shared experts, this replica's own values."""

    token_counts: list[int]  # of every replica
    is_anyone_busy: bool  # whether any has work left
    is_decode_everywhere: bool  # whether no replica prefills in this step
    num_draft_passes: int = 0  # of the prediction layer behind this step, the most that any wants
    sampled_counts: tuple[int, ...] = (0,)  # of every replica, sequences that get a token in this step


@dataclass(frozen=True)
class ParallelState:
    """TP: ranks that share every request. DP: ranks with the same TP index in the replicas of an instance.

    EP: ranks that share experts.
    """

    config: ParallelConfig
    tp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator  # all TP x DP ranks with expert parallel, else one rank
    # The ranks of `ep` in a group of its own, for `RolloutOps.exchanged_experts` alone: the Ascend kernels behind it
    # share no communicator. One rank with expert_exchange="all_gather".
    exchange: GroupCoordinator

    def exchange_step(
        self,
        num_tokens: int,
        has_unfinished: bool,
        is_decode_only: bool,
        device: torch.device,
        num_draft_passes: int = 0,
        num_sampled: int = 0,
    ) -> StepExchange:
        """Exchange the facts about the next step with the other replicas; one small all-gather."""
        if not self.config.steps_in_lockstep:
            return StepExchange([num_tokens], has_unfinished, is_decode_only, num_draft_passes, (num_sampled,))
        facts = [num_tokens, has_unfinished, is_decode_only, num_draft_passes, num_sampled]
        mine = async_tensor_h2d(np.array(facts, dtype=np.int32), device)
        counts, unfinished, decode_only, passes, sampled = self.dp.all_gather(mine).T.tolist()
        return StepExchange(counts, any(unfinished), all(decode_only), max(passes), tuple(sampled))

    def is_any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank that generates together with this one: TP ranks, and replicas that share
        experts or requests. All of them must call it.
        """
        flags = self.tp.all_gather(async_tensor_h2d(np.array([flag], dtype=np.int32), device))
        if self.config.steps_in_lockstep or self.config.rebalance_steps:
            flags = self.dp.all_gather(flags)
        return bool(flags.any())

    def used_groups(self) -> dict[str, GroupCoordinator]:
        """Return the groups of several ranks that generation sends over, by field name."""
        used = {"tp": self.tp, "exchange": self.exchange}
        if self.config.expert_exchange != "dispatch":
            used["ep"] = self.ep
        if self.config.steps_in_lockstep or self.config.rebalance_steps:
            used["dp"] = self.dp
        return {name: coordinator for name, coordinator in used.items() if coordinator.group is not None}

    def connect(self, device: torch.device) -> None:
        """Make the communicators of the used groups, whose buffers then exist when the KV cache is sized.

        Every rank calls it.
        """
        for coordinator in self.used_groups().values():
            coordinator.all_reduce(torch.zeros(1, device=device))

    def destroy(self) -> None:
        """Destroy the groups; every rank calls it."""
        for coordinator in (self.tp, self.dp, self.ep, self.exchange):
            coordinator.destroy()


def init_model_parallel(
    config: ParallelConfig, group_options: GroupOptions = lambda group: None, has_reduce_scatter: bool = True
) -> ParallelState:
    """Build this engine's groups; collective over the engine's ranks, all of which make every group in the same order.

    `group_options`, `has_reduce_scatter`: see ``Platform``.

    If the engine does not have all ranks of torch.distributed, only the members of a group create it.
    """
    if config.world_size == 1:
        alone = GroupCoordinator(0, 1, None)
        return ParallelState(config, alone, alone, alone, alone)
    tp_size, dp_size, span = config.tensor_parallel_size, config.data_parallel_size, config.ranks_per_instance
    starts = range(0, config.world_size, span)
    dp: list[list[int]] = []  # independent replicas, in the launcher's order
    # NPU-ADAPTATION(dp-groups-from-world): DP groups come from the launcher's own world, not from a second rendezvous
    # with ports of its own (VLLM_DP_MASTER_PORT), which hosts with several network cards get wrong; drop when DP
    # engines outlive their launcher.
    dp = [[first + tp + tp_size * d for d in range(dp_size)] for first in starts for tp in range(tp_size)]
    # NPU-ADAPTATION END
    tp = [list(range(first, first + tp_size)) for first in range(0, config.world_size, tp_size)]
    ep = [list(range(first, first + span)) for first in starts] if config.enable_expert_parallel else []
    exchange = ep if config.expert_exchange == "dispatch" else []
    groups = {"tp": tp, "dp": dp, "ep": ep, "exchange": exchange}
    made = {name: _coordinator(name, of, config, group_options(name)) for name, of in groups.items()}
    return ParallelState(
        config, **{name: replace(group, has_reduce_scatter=has_reduce_scatter) for name, group in made.items()}
    )


def _coordinator(name: str, groups: list[list[int]], config: ParallelConfig, options: Any) -> GroupCoordinator:
    """Create all `groups` and return this rank's."""
    mine = GroupCoordinator(0, 1, None)
    rank, first, is_alone = config.rank, config.first_rank, config.first_rank == 0
    for ranks in groups:
        if len(ranks) == 1 or not (is_alone or rank in ranks):
            continue
        members = [first + member for member in ranks]
        group = dist.new_group(
            members,
            timeout=COLLECTIVE_TIMEOUT,
            pg_options=options,
            group_desc=GROUP_PREFIX + name,
            use_local_synchronization=not is_alone,
        )
        if rank in ranks:
            mine = GroupCoordinator(ranks.index(rank), len(ranks), group)
    return mine
