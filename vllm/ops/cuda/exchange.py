"""The experts of a group on NVIDIA devices, by collectives of torch.distributed.

Few tokens, as decode steps have, are gathered by every rank of the group, which runs its own experts on them; one
reduce-scatter gives each rank the sums of its tokens. No shape depends on the routing and nothing waits for the device,
so such a step can be captured. It moves what all-to-alls without split sizes would, which have room for every token on
every rank. Many tokens, as prefills have, travel to the ranks of their experts alone, by uneven all-to-alls that wait
for the host.

Letters: T tokens of this rank, N those of the group, E experts of this rank, B bytes of a token's row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import Choices, ExpertMatrices, FusedExperts
from vllm.ops.reference_moe import all_to_all_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MOST_GATHERED_TOKENS = 4096  # of a group: what `fused_experts` takes at a time with eight choices of a token


def is_gathered(num_tokens: int, num_ranks: int) -> bool:
    """Whether a group's tokens are gathered: when all ranks together have at most ``MOST_GATHERED_TOKENS`` rows,
    padding included. Every rank has as many, so all decide alike; a step that is captured has a fixed number, so it
    takes the same way in the eager run before, in the capture and in every replay.
    """
    return num_tokens * num_ranks <= MOST_GATHERED_TOKENS


def capture_problems(config: VllmConfig) -> list[str]:
    """Return why the exchange of an engine's experts cannot be captured, one sentence each."""
    parallel = config.parallel
    if parallel.expert_exchange != "dispatch" or parallel.expert_parallel_size == 1:
        return []
    sizes, num_ranks = config.compilation.cudagraph_capture_sizes, parallel.expert_parallel_size
    largest = max(sizes, default=0)
    if is_gathered(-(-largest // parallel.tensor_parallel_size), num_ranks):
        return []
    most = MOST_GATHERED_TOKENS // num_ranks * parallel.tensor_parallel_size
    return [
        f"cudagraph_capture_sizes up to {largest} with expert_exchange=dispatch over {num_ranks} ranks: what more than "
        f"{most} sequences of a replica send depends on values; capture sizes up to {most}"
    ]


def exchanged_experts(
    x_TH: Tensor,
    matrices: ExpertMatrices,
    choices: Choices,
    num_active: int,
    group: GroupCoordinator,
    experts: FusedExperts,
) -> Tensor:
    """See ``RolloutOps.exchanged_experts``; `experts` is the table's `fused_experts`. Padding is gathered too.

    Tolerance: that of `fused_experts`. The sums of up to K ranks are added in the dtype of x.
    """
    if not is_gathered(len(x_TH), group.world_size):
        return all_to_all_experts(x_TH, matrices, choices, num_active, group, experts)
    num_here = len(matrices[0])
    first = group.rank_in_group * num_here
    x_NH, weights_NK, ids_NK = _gathered(x_TH, *choices, group)
    if num_here < ids_NK.shape[1]:
        weights_NK, ids_NK = _own_choices(weights_NK, ids_NK, first, num_here)
    return group.reduce_scatter(experts(x_NH, matrices, (weights_NK, ids_NK), first))


def _gathered(
    x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, group: GroupCoordinator
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, weights and choices of all ranks; they travel as one tensor of bytes."""
    parts = [part.contiguous().view(torch.uint8) for part in (x_TH, weights_TK, ids_TK.to(torch.int32))]
    rows_NB = group.all_gather(torch.cat(parts, dim=1)).flatten(0, 1)
    x_NB, weights_NB, ids_NB = rows_NB.split([part.shape[1] for part in parts], dim=1)
    return (
        x_NB.contiguous().view(x_TH.dtype),
        weights_NB.contiguous().view(weights_TK.dtype),
        ids_NB.contiguous().view(torch.int32).to(ids_TK.dtype),
    )


def _own_choices(weights_NK: Tensor, ids_NK: Tensor, first: int, num_here: int) -> tuple[Tensor, Tensor]:
    """[N, E] each: a token chooses no expert twice, so at most E of its choices are experts of this rank."""
    is_elsewhere_NK = (ids_NK < first) | (ids_NK >= first + num_here)
    order_NE = is_elsewhere_NK.to(torch.int8).argsort(dim=1, stable=True)[:, :num_here]
    return weights_NK.gather(1, order_NE), ids_NK.gather(1, order_NE)
