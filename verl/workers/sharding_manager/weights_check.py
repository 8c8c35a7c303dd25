"""Whether the rollout engine holds what the trainer trains, by a digest of every tensor of every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.weight_plan import Slice, slice_shape
from verl.workers.sharding_manager.trained_weights import TrainedWeights
from verl.workers.sharding_manager.transfer_plan import Cell, TransferPlan
from vllm.model_executor.layers.quantization.fp8 import FP8_DTYPE
from vllm.model_executor.model_loader.digest import WeightDigest, differences, slice_digest

_SHOWN = 12
_CHUNK_ELEMENTS = 1 << 20  # of a weight, converted at a time


@torch.no_grad()
def expected_digests(
    plan: TransferPlan, trained: TrainedWeights, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """int64 [slices of the plan], on the host: the digest that each has in the rollout engine's dtype.

    Collective over `group`. Every element is taken from a training weight once, by one of its holders, beside the way
    that the weights take; the sums of the parts of a slice meet in one all-reduce.
    """
    sums_N = torch.zeros(len(plan.slices), dtype=torch.int64, device=device)
    for cell in plan.cells:
        if cell.digester == group.rank():
            sums_N[cell.index] += _digest(cell, trained, plan.held_dtypes[cell.hf_name])
    dist.all_reduce(sums_N, group=group)
    return sums_N.cpu()


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
        expected_N: of `expected_digests`.
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


def _digest(cell: Cell, trained: TrainedWeights, dtype: torch.dtype) -> Tensor:
    """int64 scalar: what the cell adds to the digest of its slice, in the whole tensor's coordinates."""
    values = trained.values(cell.hf_name, cell.ranges, cell.fragment)
    starts = tuple(start for start, _ in cell.ranges)
    if values.dtype == dtype:
        return slice_digest(cell.hf_name, values, starts)
    assert dtype != FP8_DTYPE, cell.hf_name
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    step = max(1, _CHUNK_ELEMENTS * len(values) // values.numel())
    for first in range(0, len(values), step):
        part = values[first : first + step].to(dtype)
        total += slice_digest(cell.hf_name, part, (starts[0] + first, *starts[1:]))
    return total
