"""One exchange per group of a run, with that group's own HCCL options, dtype and size: values, time and GB/s.

A group here has all visible dies. What it sends is what it sends most of in the 671B run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.pipeline_parallel.p2p_communication import PipelineLink
from megatron.core.tensor_parallel.collectives import reduce_scatter
from mindspeed.core.hccl_buffer import BUFFER_MIB, HcclGroups
from tools.doctor.die_check import Check, Die, difference, in_ms
from tools.doctor.finding import Finding
from vllm.distributed.parallel_state import GroupCoordinator
from vllm_ascend.platform import BUFFER_MIB as ROLLOUT_BUFFER_MIB

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
HALF_OF_A_MICRO_BATCH = 3072 * 7168 // 2


@dataclass(frozen=True)
class Traffic:
    """What a rank of a group gives to one exchange."""

    kind: str  # a key of EXCHANGES
    dtype: torch.dtype
    numel: int


ACTIVATIONS = Traffic("all_gather", BF16, HALF_OF_A_MICRO_BATCH)
TOKENS = Traffic("all_to_all", BF16, HALF_OF_A_MICRO_BATCH)
GRADIENTS = Traffic("reduce_scatter", FP32, 1 << 22)
FEW_NUMBERS = Traffic("all_reduce", FP32, 1 << 10)
TRAINING = {
    "tp": ACTIVATIONS,
    "cp": TOKENS,
    "dp_cp": GRADIENTS,
    "edp": GRADIENTS,
    "etp": ACTIVATIONS,
    "ep": TOKENS,
    "etp_ep": TOKENS,
    "dp": FEW_NUMBERS,
    "pp": Traffic("to the next", BF16, HALF_OF_A_MICRO_BATCH),
    "mp": FEW_NUMBERS,
    "tp_cp": FEW_NUMBERS,
    "tp_dp_cp": FEW_NUMBERS,
}
ROLLOUT = {
    "tp": Traffic("all_reduce", BF16, 64 * 7168),
    "ep": Traffic("all_gather", BF16, 64 * 7168),
    "dp": Traffic("all_gather", INT32, 64),
}


def checks() -> list[Check]:
    """A row for each group that has a buffer of its own."""
    return [
        *(Check(f"training {group}", partial(check_training, group)) for group in BUFFER_MIB),
        *(Check(f"rollout {group}", partial(check_rollout, group)) for group in ROLLOUT_BUFFER_MIB),
    ]


def check_training(group: str, die: Die) -> Finding:
    return check(f"training {group}", TRAINING[group], HcclGroups().options(group), die)


def check_rollout(group: str, die: Die) -> Finding:
    return check(f"rollout {group}", ROLLOUT[group], die.platform.group_options(group), die)


def check(name: str, traffic: Traffic, options: Any, die: Die) -> Finding:
    """Collective over all ranks, which make the same calls whatever each of them finds."""
    group = GroupCoordinator(die.rank, die.num_dies, dist.new_group(list(range(die.num_dies)), pg_options=options))
    numel = traffic.numel // die.num_dies * die.num_dies
    everyones = torch.stack([_given(rank, numel, die.device) for rank in range(die.num_dies)]).to(traffic.dtype)
    exchange, expect = EXCHANGES[traffic.kind]
    mine = everyones[die.rank].contiguous()
    wrong = difference(exchange(group, mine.clone()), expect(everyones, die.rank))
    took = die.seconds(lambda: exchange(group, mine.clone()))
    group.destroy()
    what = f"{traffic.kind}, {str(traffic.dtype).removeprefix('torch.')}, {mine.nbytes / 1e6:.3g} MB"
    if wrong:
        remedy = "do not train over these links: run hccl_test of CANN's tools, and report it with the versions"
        return Finding(name, f"{what}: {wrong}", remedy, is_fatal=True)
    return Finding(name, f"{what}: {in_ms(took)}, {mine.nbytes / took / 1e9:.3g} GB/s")


def _given(rank: int, numel: int, device: torch.device) -> Tensor:
    """What a rank gives: small integers, whose sums over the dies of a node every dtype holds exactly."""
    return torch.arange(numel, device=device, dtype=INT32) % 5 + rank % 3


def _reduce_scatter(group: GroupCoordinator, x: Tensor) -> Tensor:
    assert group.group is not None
    return reduce_scatter(x, group.group)[0]


def _to_the_next(group: GroupCoordinator, x: Tensor) -> Tensor:
    """As between pipeline stages, over communicators of two ranks; the first rank gets nothing."""
    rank, last = group.rank_in_group, group.world_size - 1
    assert group.group is not None
    link = PipelineLink(group.group, rank - 1 if rank else None, rank + 1 if rank < last else None, x.dtype, x.device)
    received = link.exchange(recv_prev=tuple(x.shape))
    link.exchange(send_next=x)
    return x if received is None else received.detach()


# Kind -> what a rank calls, and what it has afterwards, by what all ranks gave [ranks, numbers] and its own rank.
EXCHANGES: dict[str, tuple[Callable[[GroupCoordinator, Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "all_reduce": (GroupCoordinator.all_reduce, lambda everyones, _: everyones.sum(0, dtype=everyones.dtype)),
    "all_gather": (GroupCoordinator.all_gather, lambda everyones, _: everyones),
    "all_to_all": (
        lambda group, x: group.all_to_all(x.view(group.world_size, -1)).flatten(),
        lambda everyones, rank: everyones.unflatten(1, (len(everyones), -1))[:, rank].flatten(),
    ),
    "reduce_scatter": (
        _reduce_scatter,
        lambda everyones, rank: everyones.sum(0).unflatten(0, (len(everyones), -1))[rank],
    ),
    "to the next": (_to_the_next, lambda everyones, rank: everyones[max(rank - 1, 0)]),
}
