"""Scattered writes, after the page "torch_npu.npu_scatter_nd_update_" of the Ascend documentation."""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require


@reference("npu_scatter_nd_update_")
def scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """``input[indices[i]] = updates[i]`` in place; the last dimension of indices addresses input's first ones."""
    op = "npu_scatter_nd_update_"
    depth = indices.shape[-1]
    require(indices.dtype in (torch.int32, torch.int64), op, f"indices of {indices.dtype}")
    require(input.dtype == updates.dtype, op, f"input of {input.dtype}, updates of {updates.dtype}")
    require(updates.shape == indices.shape[:-1] + input.shape[depth:], op, f"updates of {tuple(updates.shape)}")
    rows = indices.reshape(-1, depth).long()
    bounds = torch.tensor(input.shape[:depth])
    require(bool(((rows >= 0) & (rows < bounds)).all()), op, "an index is outside of the input")
    input[tuple(rows.t())] = updates.reshape(-1, *input.shape[depth:])
    return input
