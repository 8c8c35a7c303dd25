"""Checks, before a step sends anything, that ranks which wait for one another agree on its micro-batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups
from megatron.core.pipeline_parallel.p2p_communication import Shape
from megatron.core.tensor_parallel.collectives import all_gather
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import async_h2d

MAX_SHOWN = 4


def require_agreement(shapes: Sequence[Shape], model: nn.Module, groups: ProcessGroups, forward_only: bool) -> None:
    """Compare the shapes that stages exchange for each micro-batch; collective over the world.

    Raises ``ValueError`` on every rank, with the ranks and both numbers, when ranks that communicate within the step
    have different numbers or shapes of micro-batches: otherwise they would wait for one another for ever.
    """
    is_mean = not cast(TransformerConfig, model.config).calculate_per_token_loss
    device = next(model.parameters()).device
    table = _exchange(groups, device, (len(shapes), int(forward_only), _digest(shapes)), is_mean)
    problems = [] if table is None else disagreements(groups.layout, table, is_mean)
    if table is not None and any("shapes" in problem for problem in problems):
        problems = _with_shapes(groups, shapes, table)
    if problems:
        raise ValueError("micro-batches of this step differ between ranks: " + "; ".join(problems))


def disagreements(layout: ParallelLayout, table: Tensor, is_mean: bool) -> list[str]:
    """Return the differences between ranks that must agree, for at most ``MAX_SHOWN`` pairs of ranks.

    ``table`` [world, 3] int64: number of micro-batches, forward only or not, digest of their shapes. Ranks of one
    replica (TP, CP, PP) need the same of everything, ranks that exchange experts' tokens the same number, and with
    losses that are means of micro-batches (``is_mean``) so do all.
    """
    replica, experts = _leaders(layout)
    counts_leader = torch.zeros_like(replica) if is_mean else replica
    found: list[str] = []
    for column, leaders, what in (
        (0, counts_leader, "{} micro-batches"),
        (0, experts, "{} micro-batches"),
        (1, replica, "forward_only {}"),
        (1, experts, "forward_only {}"),
        (2, replica, "shapes with digest {}"),
    ):
        if found and column == 2:
            break  # with different numbers of micro-batches the shapes differ too
        values = table[:, column]
        for rank in (values != values[leaders]).nonzero().flatten().tolist():
            leader = int(leaders[rank])
            mine, other = (what.format(bool(v) if column == 1 else v) for v in (int(values[rank]), int(values[leader])))
            sentence = f"rank {leader} has {other}, rank {rank} has {mine}"
            if sentence not in found:
                found.append(sentence)
    return found[:MAX_SHOWN] + ([f"and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else [])


def _with_shapes(groups: ProcessGroups, shapes: Sequence[Shape], table: Tensor) -> list[str]:
    """The first different micro-batch of each pair of ranks; reached by every rank or by none."""
    of_rank: list[Sequence[Shape]] = [()] * groups.world.size()
    dist.all_gather_object(of_rank, [tuple(shape) for shape in shapes], group=groups.world)
    replica, _ = _leaders(groups.layout)
    found = []
    for rank in (table[:, 2] != table[replica, 2]).nonzero().flatten().tolist()[:MAX_SHOWN]:
        leader = int(replica[rank])
        pairs = zip(of_rank[leader], of_rank[rank], strict=True)  # of one number, which was compared before
        at, (other, mine) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        found.append(f"micro-batch {at} is {other} on rank {leader} and {mine} on rank {rank}")
    return found


def _exchange(groups: ProcessGroups, device: torch.device, own: tuple[int, ...], is_mean: bool) -> Tensor | None:
    """Return the numbers of all ranks [world, 3] on the host; None where no two ranks communicate within a step."""
    layout = groups.layout
    axes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    if groups.world.size() == 1 or not (is_mean or any(getattr(layout, f"{a}_parallel_size") > 1 for a in axes)):
        return None
    table, _ = all_gather(async_h2d(torch.tensor([own], dtype=torch.int64), device), groups.world)
    return table.cpu()


def _digest(shapes: Sequence[Shape]) -> int:
    text = repr([tuple(int(size) for size in shape) for shape in shapes])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@lru_cache(maxsize=4)
def _leaders(layout: ParallelLayout) -> tuple[Tensor, Tensor]:
    """Return two int64 [world]: every rank's first rank of its replica, and of the ranks it shares experts with."""
    ranks = range(layout.world_size)
    replica = [layout.members(rank, ("tp", "cp", "pp"))[0] for rank in ranks]
    experts = [layout.members(rank, ("tp", "ep"), is_expert=True)[0] for rank in ranks]
    return torch.tensor(replica), torch.tensor(experts)
