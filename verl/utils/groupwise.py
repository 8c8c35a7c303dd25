"""For plug-ins alone: statistics of groups of rows (upstream: ``verl.utils.groupwise``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol_storage import as_rows


def as_torch_index(index: Any, device: torch.device | str | None = None) -> Tensor:
    """int64 [B]: the group of every row, 0, 1, ... in the order of first appearance.

    ``index`` holds anything that can be compared: numbers (floats near an integer count as it), strings, objects.
    The result is on ``device``, or where ``index`` is.
    """
    if isinstance(index, Tensor):
        device = index.device if device is None else device
        index = index.detach().cpu().numpy()
    values = as_rows(index) if isinstance(index, list | tuple) else np.asarray(index)
    if values.ndim != 1:
        raise ValueError(f"index of shape {values.shape}, expected one group per row: [B]")
    numbers: dict[Any, int] = {}
    groups = [numbers.setdefault(_group_key(value), len(numbers)) for value in values.tolist()]
    return torch.tensor(groups, dtype=torch.long, device="cpu" if device is None else device)


@torch.no_grad()
def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, standard deviation, number of rows) of each group, fp32 [G].

    The deviation divides by n - 1, its square is at least ``eps``; a group of one row has mean 0 and deviation 1.
    """
    target = scores.device if device is None else torch.device(device)
    values, groups = scores.reshape(-1).to(target, torch.float32), gidx.reshape(-1).to(target, torch.long)
    if values.numel() != groups.numel():
        raise ValueError(f"{values.numel()} scores in {groups.numel()} groups' rows")
    num_groups = int(groups.max()) + 1 if groups.numel() else 0
    count = torch.bincount(groups, minlength=num_groups).to(torch.float32)
    zeros = torch.zeros(num_groups, dtype=torch.float32, device=target)
    mean = zeros.index_add(0, groups, values) / count.clamp(min=1)
    squares = zeros.index_add(0, groups, (values - mean[groups]).square())
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    is_single = count <= 1
    return mean.masked_fill(is_single, 0.0), std.masked_fill(is_single, 1.0), count


def _group_key(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and abs(value - round(value)) < 1e-6:
        return round(value)
    return value
