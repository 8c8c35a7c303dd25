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
    trained_N: Tensor,
    found: dict[str, WeightDigest] | None,
    held: dict[str, Slice],
    group: dist.ProcessGroup,
) -> None:
    """RuntimeError, on every rank of `group`, naming the weights in a rank's rollout engine that are not the trainer's.

    One all-reduce: the ranks' parts of what is expected, and what the holders of each slice found, added up.

    Args:
        trained_N: `WeightTransfer.sums_N` of this rank.
        found: digests of this rank's rollout engine, None where there is none; held: what it holds of each tensor.
    """
    here = {name: plan.slices[name, ranges] for name, ranges in held.items()}
    expected = {name: WeightDigest(slice_shape(held[name]), plan.held_dtypes[name], 0) for name in held}
    found = found or {}
    found_N = torch.zeros_like(trained_N, device="cpu")
    for name in here.keys() & found.keys():
        found_N[here[name]] = _signed(found[name].value)
    num_odd = len(differences(expected, {name: digest._replace(value=0) for name, digest in found.items()}))
    parts = (trained_N, found_N.to(trained_N.device), trained_N.new_tensor([num_odd]))
    sums = torch.cat(parts)
    dist.all_reduce(sums, group=group)
    expected_N, found_N, num_odd_1 = sums.cpu().split([len(part) for part in parts])
    if not int(num_odd_1) and torch.equal(found_N, expected_N * torch.from_numpy(plan.num_holders_N)):
        return
    expected = {name: digest._replace(value=int(expected_N[here[name]]) % 2**64) for name, digest in expected.items()}
    mine = differences(expected, found)
    of_ranks: list[tuple[int, list[str]]] = [(0, [])] * group.size()
    dist.all_gather_object(of_ranks, (len(mine), mine[:_SHOWN]), group=group)
    wrong = [(rank, count, shown) for rank, (count, shown) in enumerate(of_ranks) if count]
    rank, count, shown = wrong[0]
    lines = [*shown, *([f"and {count - _SHOWN} more"] if count > _SHOWN else [])]
    raise RuntimeError(
        f"{count} weights of rank {rank}'s rollout engine differ from the trainer's after the sync (ranks with "
        f"differences: {', '.join(str(r) for r, _, _ in wrong)}):\n" + "\n".join(f"  - {line}" for line in lines)
    )


def _signed(value: int) -> int:
    """Of 64 bits."""
    return value - 2**64 if value >= 2**63 else value
