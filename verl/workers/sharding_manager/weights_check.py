"""Whether the rollout engine holds what the trainer trains, by a digest of every tensor of every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.weight_plan import Slice, slice_shape
from verl.workers.sharding_manager.transfer_plan import TransferPlan
from vllm.model_executor.model_loader.digest import WeightDigest, differences

_SHOWN = 12


def check_rollout_weights(
    plan: TransferPlan,
    expected_N: Tensor,
    found: dict[str, WeightDigest] | None,
    held: dict[str, Slice],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """RuntimeError, on every rank of `group`, naming the weights in a rank's rollout engine that are not the trainer's.

    Args:
        expected_N: of `WeightTransfer.expected_digests`.
        found: digests of this rank's rollout engine, None where there is none; held: what it holds of each tensor.
    """
    expected = {}
    for name, ranges in held.items():
        value = int(expected_N[plan.slices[name, ranges]]) % 2**64
        expected[name] = WeightDigest(slice_shape(ranges), plan.held_dtypes[name], value)
    mine = differences(expected, found or {})
    any_wrong = torch.tensor(len(mine), device=device)
    dist.all_reduce(any_wrong, group=group)
    if not int(any_wrong):
        return
    of_ranks: list[tuple[int, list[str]]] = [(0, [])] * group.size()
    dist.all_gather_object(of_ranks, (len(mine), mine[:_SHOWN]), group=group)
    wrong = [(rank, count, shown) for rank, (count, shown) in enumerate(of_ranks) if count]
    rank, count, shown = wrong[0]
    lines = [*shown, *([f"and {count - _SHOWN} more"] if count > _SHOWN else [])]
    raise RuntimeError(
        f"{count} weights of rank {rank}'s rollout engine differ from the trainer's after the sync (ranks with "
        f"differences: {', '.join(str(r) for r, _, _ in wrong)}):\n" + "\n".join(f"  - {line}" for line in lines)
    )
