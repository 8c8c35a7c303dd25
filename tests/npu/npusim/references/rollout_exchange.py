"""Tokens to their experts on other ranks and back, after "torch_npu.npu_moe_distribute_dispatch_v2" and
"torch_npu.npu_moe_distribute_combine_v2" of the Ascend documentation, with A3's limits.

The group is found by its HCCL name; the rows travel over a host group of the same ranks, because a replayed graph runs
this again and may use no device op for it. ``assist_info`` of an arrived row holds (source rank, token, choice), 128
numbers apart as in the op's shape; what the real kernel writes there is not said and nobody may rely on it. Simplified:
no TP group, quantisation, shared expert ranks, special experts; and not noticed: another op on the same communicator,
which the documentation forbids.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import KernelRefused, require, unwritten

MAX_TOKENS, MAX_CHOICES, MIN_HIDDEN, MAX_HIDDEN = 512, 16, 1024, 7168
MAX_RANKS, MAX_EXPERTS_TIMES_RANKS = 384, 1280
DEFAULT_BUFFER_MIB = 200
INFO_STRIDE = 128


@reference("npu_moe_distribute_dispatch_v2")
def dispatch(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    **not_simulated: Any,
) -> tuple[Tensor | None, ...]:
    """-> (arrived rows by expert, then source rank, then token; -; assist info; rows of each expert; rows of each
    (expert, source rank), summed up to it; -; -).
    """
    op = "npu_moe_distribute_dispatch_v2"
    _check_unused(op, not_simulated)
    require((group_tp, tp_world_size, tp_rank_id) == (group_ep, 1, 0), op, "a TP group but that of one rank on A3")
    require(quant_mode == shared_expert_rank_num == global_bs == 0, op, "quantisation, shared ranks, global_bs")
    require(expert_token_nums_type == 1, op, "only counts are simulated")
    num_here = _check(op, x, expert_ids, x_active_mask, ep_world_size, moe_expert_num, shared_expert_num)
    group = _group(op, group_ep, ep_world_size, ep_rank_id)
    tokens, choices = expert_ids.shape
    everyone = _gather(group, torch.tensor([tokens, choices, x.shape[1]]))
    require(
        bool((everyone == everyone[0]).all()), op, f"ranks differ in [tokens, choices, hidden]: {everyone.tolist()}"
    )

    active = tokens if x_active_mask is None else int(x_active_mask.sum())
    ids = expert_ids[:active].long().flatten()
    order = ids.argsort(stable=True)
    info = torch.stack((torch.full_like(order, ep_rank_id), order // choices, order % choices, ids[order]), dim=1)
    sent = torch.bincount(ids // num_here, minlength=ep_world_size)
    received = _all_to_all(group, sent, None, None)
    counts = sent.tolist(), received.tolist()
    info = _all_to_all(group, info, *counts)
    rows = _all_to_all(group, x[order // choices], *counts)
    # Sources come in the order of their ranks and each one's rows in that of its tokens, so a stable sort does it.
    by_expert = info[:, 3].argsort(stable=True)
    info, rows = info[by_expert], rows[by_expert]

    local, source = info[:, 3] - ep_rank_id * num_here, info[:, 0]
    capacity = tokens * ep_world_size * min(num_here, choices)
    expand_x = unwritten(x, capacity, x.shape[1])
    expand_x[: len(rows)] = rows
    assist = torch.full((capacity, INFO_STRIDE), -1, dtype=torch.int32)
    assist[: len(rows), :3] = info[:, :3].int()
    per_source = torch.bincount(local * ep_world_size + source, minlength=num_here * ep_world_size)
    expert_counts = torch.bincount(local, minlength=num_here)
    return expand_x, None, assist.flatten(), expert_counts, per_source.cumsum(0).int(), None, None


@reference("npu_moe_distribute_combine_v2")
def combine(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    **not_simulated: Any,
) -> Tensor:
    """-> [tokens, hidden]: the sum of each token's rows, weighted with ``expert_scales``; NaN where it is masked."""
    op = "npu_moe_distribute_combine_v2"
    _check_unused(op, not_simulated)
    require((group_tp, tp_world_size, tp_rank_id) == (group_ep, 1, 0), op, "a TP group but that of one rank on A3")
    require(comm_quant_mode == shared_expert_rank_num == global_bs == 0, op, "quantisation, shared ranks, global_bs")
    _check(op, expand_x, expert_ids, x_active_mask, ep_world_size, moe_expert_num, shared_expert_num)
    require(expert_scales.dtype == torch.float32 and expert_scales.shape == expert_ids.shape, op, "expert_scales")
    group = _group(op, group_ep, ep_world_size, ep_rank_id)

    num_rows = int(ep_send_counts[-1])
    info = assist_info_for_combine.view(-1, INFO_STRIDE)[:num_rows, :3].long()
    back = info[:, 0].argsort(stable=True)
    sent = torch.bincount(info[:, 0], minlength=ep_world_size)
    counts = sent.tolist(), _all_to_all(group, sent, None, None).tolist()
    rows = _all_to_all(group, expand_x[:num_rows][back], *counts).double()
    _, token, choice = _all_to_all(group, info[back], *counts).unbind(1)

    tokens = len(expert_ids)
    summed = torch.zeros(tokens, expand_x.shape[1], dtype=torch.float64)
    summed.index_add_(0, token, rows * expert_scales[token, choice].double().unsqueeze(1))
    if x_active_mask is not None:
        summed[~x_active_mask] = float("nan")
    return summed.to(expand_x.dtype)


def _check_unused(op: str, arguments: dict[str, Any]) -> None:
    unused = {name: value for name, value in arguments.items() if not (value is None or value in (0, ""))}
    require(not unused, op, f"{sorted(unused)} are not simulated")


def _check(
    op: str, x: Tensor, expert_ids: Tensor, mask: Tensor | None, ranks: int, num_experts: int, shared: int
) -> int:
    """A3's limits; returns how many experts each rank holds."""
    tokens, choices = expert_ids.shape
    hidden = x.shape[1]
    require(x.dtype in (torch.float16, torch.bfloat16), op, f"wants float16 or bfloat16, got {x.dtype}")
    require(MIN_HIDDEN <= hidden <= MAX_HIDDEN, op, f"hidden size {hidden}")
    require(expert_ids.dtype == torch.int32, op, f"expert_ids of {expert_ids.dtype}")
    require(0 < tokens <= MAX_TOKENS and 0 < choices <= MAX_CHOICES, op, f"{tokens} tokens of {choices} choices")
    require(2 <= ranks <= MAX_RANKS and num_experts % ranks == 0, op, f"{num_experts} experts over {ranks} ranks")
    require(num_experts // ranks * ranks <= MAX_EXPERTS_TIMES_RANKS, op, f"{num_experts} experts over {ranks} ranks")
    require(bool(((expert_ids >= 0) & (expert_ids < num_experts)).all()), op, "an expert that is none")
    ascending = expert_ids.sort(dim=1).values
    require(not bool((ascending[:, 1:] == ascending[:, :-1]).any()), op, "an expert twice in one row")
    if mask is not None:
        require(mask.dtype == torch.bool and mask.shape == (tokens,), op, f"mask of {tuple(mask.shape)}")
        require(bool((mask[1:] <= mask[:-1]).all()), op, "in the mask, True comes before False")
    arriving = num_experts // ranks * tokens * ranks * _align(_align(2 * hidden, 32) + 64, 512)
    needed = 2 * (arriving + (choices + shared) * tokens * _align(2 * hidden, 512))
    buffer = int(os.environ.get("HCCL_BUFFSIZE", DEFAULT_BUFFER_MIB)) * 2**20
    require(needed <= buffer, op, f"HCCL_BUFFSIZE of {buffer} bytes, {needed} are needed")
    return num_experts // ranks


def _align(size: int, step: int) -> int:
    return -(-size // step) * step


_host_groups: dict[str, dist.ProcessGroup] = {}


def _group(op: str, name: str, size: int, rank: int) -> dist.ProcessGroup:
    """A host group of the ranks of the process group that has this HCCL name; made at the first call."""
    if name not in _host_groups:
        ranks = _ranks_of(op, name, size, rank)
        _host_groups[name] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[name]


def _ranks_of(op: str, name: str, size: int, rank: int) -> list[int]:
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_backend(group) == "hccl" and group.size() == size and dist.get_rank(group) == rank:
            backend: Any = group._get_backend(torch.device("npu"))
            if backend.get_hccl_comm_name(rank, init_comm=False) == name:
                return dist.get_process_group_ranks(group)
    raise KernelRefused(f"{op}: no group of {size} ranks with this one at {rank} is named {name!r}")


def _all_to_all(group: dist.ProcessGroup, x: Tensor, sent: list[int] | None, received: list[int] | None) -> Tensor:
    arrived = x.new_empty((len(x) if received is None else sum(received), *x.shape[1:]))
    # As bytes: gloo knows no bfloat16.
    width = math.prod(x.shape[1:])
    mine, theirs = (tensor.reshape(len(tensor), width).contiguous().view(torch.uint8) for tensor in (x, arrived))
    dist.all_to_all_single(theirs, mine, received, sent, group=group)
    return theirs.view(x.dtype).view_as(arrived)


def _gather(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.stack(parts)
