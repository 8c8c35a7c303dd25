"""Statistics over the responses to one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.utils.masks import selected

# The group of every row: keys of any kind, as prompts' uids.
GroupIndex = Sequence[object] | np.ndarray | Tensor


def group_ids(index: GroupIndex) -> Tensor:
    """Consecutive integers [B] for the group keys, in order of first appearance."""
    keys = index.tolist() if isinstance(index, np.ndarray | Tensor) else index
    seen: dict[object, int] = {}
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys])


def group_sums(values_B: Tensor, ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of every row's group, size of every row's group), both [B]."""
    ids_B = ids_B.to(values_B.device)
    num_groups = int(ids_B.max()) + 1
    sums = values_B.new_zeros(num_groups).index_add_(0, ids_B, values_B)
    sizes = torch.bincount(ids_B, minlength=num_groups).to(values_B.dtype)
    return sums[ids_B], sizes[ids_B]


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` with mean 0 and variance 1 over the tokens of ``mask``, and 0 elsewhere; a single token gives 0."""
    values, count = selected(values, mask), mask.sum()
    mean = (values * mask).sum() / count.clamp(min=1)
    variance = ((values - mean).square() * mask).sum() / (count - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask
