"""Statistics over the responses to one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_ids(index: Sequence[object]) -> Tensor:
    """Consecutive integers [B] for the group keys, in order of first appearance."""
    seen: dict[object, int] = {}
    return torch.tensor([seen.setdefault(key, len(seen)) for key in index])


def group_sums(values_B: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of every row's group, size of every row's group), both [B]."""
    num_groups = int(ids_B.max()) + 1
    sums = values_B.new_zeros(num_groups).index_add_(0, ids_B, values_B)
    sizes = torch.bincount(ids_B, minlength=num_groups).to(values_B.dtype)
    return sums[ids_B], sizes[ids_B]
