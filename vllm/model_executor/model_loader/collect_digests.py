"""Digests of what a rank holds of the weights, and of whole weights from what every rank of an engine holds."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.distributed.parallel_state import ParallelState
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.weight_target import StoredSlice, WeightTarget


@torch.no_grad()
def collect_digests(
    targets: dict[str, WeightTarget], parallel: ParallelState, dtype: torch.dtype, device: torch.device
) -> dict[str, WeightDigest]:
    """Hugging Face name -> digest of every tensor of the model. Collective over TP and EP.

    A rank counts its own copy of a slice that several hold, so a wrong copy shows on the rank that has it.
    dtype: of weights that other ranks hold.
    """
    stored = [part for name, target in targets.items() for part in target.stored(name, dtype)]
    mine_N3 = _rows_of(stored, device)
    is_elsewhere_N = torch.tensor([float(s.part is None) for s in stored], device=device)
    values_N, held_N = _sum_over_tp(parallel.tp.all_gather(mine_N3), parallel.tp.rank_in_group)
    parallel.ep.all_reduce(is_elsewhere_N)
    # Whole experts, each on one rank of EP; a rank's zero adds nothing.
    sums_N2 = parallel.ep.all_reduce(mine_N3[:, [0, 2]].contiguous())
    is_expert_N = is_elsewhere_N > 0
    values = torch.where(is_expert_N, sums_N2[:, 0], values_N).tolist()
    held = torch.where(is_expert_N, sums_N2[:, 1], held_N).tolist()
    for part, count in zip(stored, held, strict=True):
        expected = torch.Size(part.hf_shape).numel()
        assert count == expected, f"{part.hf_name}: the ranks hold {count} of {expected} elements"
    return {
        part.hf_name: WeightDigest(part.hf_shape, part.dtype, value % 2**64)
        for part, value in zip(stored, values, strict=True)
    }


@torch.no_grad()
def held_digests(targets: dict[str, WeightTarget]) -> dict[str, WeightDigest]:
    """Hugging Face name -> digest of this rank's slice."""
    stored = [part for name, target in targets.items() for part in target.held(name)]
    return named_digests(stored, torch.stack([slice_.digest() for slice_ in stored]))


def named_digests(stored: list[StoredSlice], digests_N: Tensor) -> dict[str, WeightDigest]:
    """Hugging Face name -> what identifies the slice."""
    return {
        slice_.hf_name: WeightDigest(tuple(slice_.part.shape), slice_.dtype, value % 2**64)
        for slice_, value in zip(stored, digests_N.tolist(), strict=True)
        if slice_.part is not None
    }


def _rows_of(stored: list[StoredSlice], device: torch.device) -> Tensor:
    """int64 [N, 3]: digest, first element in the whole tensor (-1 for none), number of elements."""
    digests, places = [], []
    for slice_ in stored:
        if slice_.part is None or slice_.part.numel() == 0:
            digests.append(torch.zeros((), dtype=torch.int64, device=device))
            places.append((-1, 0))
        else:
            first = sum(
                start * torch.Size(slice_.hf_shape[axis + 1 :]).numel() for axis, start in enumerate(slice_.starts)
            )
            digests.append(slice_.digest())
            places.append((first, slice_.part.numel()))
    return torch.cat((torch.stack(digests)[:, None], torch.tensor(places, device=device)), dim=1)


def _sum_over_tp(gathered_GN3: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """int64 [N] sums of digests and of element counts over the distinct slices of the group, this rank's copy first."""
    order = [rank, *(r for r in range(len(gathered_GN3)) if r != rank)]
    values_N, held_N = torch.zeros_like(gathered_GN3[0, :, 0]), torch.zeros_like(gathered_GN3[0, :, 0])
    for position, r in enumerate(order):
        digest_N, first_N, count_N = gathered_GN3[r].unbind(1)
        is_new_N = first_N >= 0
        for earlier in order[:position]:
            is_new_N &= gathered_GN3[earlier, :, 1] != first_N
        values_N += digest_N * is_new_N
        held_N += count_N * is_new_N
    return values_N, held_N
