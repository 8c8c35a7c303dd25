"""Matmuls of groups, after "torch_npu.npu_grouped_matmul", "aclnnGroupedMatmulV5" and "aclnnGroupedMatmulAdd" of the
Ascend documentation.

Simplified: one x, and one output (split_item 2 or 3); no quantisation, activation, bias or offsets. What the
documentation does not say is written holds NaN: rows past the last group, and the product of a group without rows when
the inner dimension is split.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats, unwritten

OP = "npu_grouped_matmul"
SPLIT_ROWS, SPLIT_INNER = 0, 2  # group_type
ENDS, COUNTS = 0, 1  # group_list_type
MAX_GROUPS = 1024
OP_ADD = "npu_grouped_matmul_add_"
MAX_ADDED_GROUPS = 128  # of ATB's form of the same kernel; aclnn's page names no limit


@reference("npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **not_simulated: Any,
) -> list[Tensor]:
    """Rows split: x [M, K], w [E, K, N] or E of [K, N] -> [M, N]. Inner split: x a transposed [K, M], w [K, N] ->
    [E, M, N].
    """
    unused = [name for name, value in not_simulated.items() if value is not None]
    require(not unused and not act_type, OP, f"{unused or 'act_type'} is not simulated")
    require(len(x) == 1 and split_item in (2, 3), OP, "only one x and one output are simulated")
    require(group_list is not None and group_list.dtype == torch.int64, OP, "wants int64 groups on the device")
    (rows,) = x
    require_floats(OP, rows, *weight)
    require(rows.dim() == 2 and rows.numel() > 0, OP, f"wants rows in two dimensions, got {tuple(rows.shape)}")
    assert group_list is not None
    if group_type == SPLIT_ROWS:
        return [_split_rows(rows, weight, _bounds(group_list, group_list_type, len(rows)))]
    require(group_type == SPLIT_INNER, OP, f"group_type {group_type} is not simulated")
    return [_split_inner(rows, weight, _bounds(group_list, group_list_type, rows.shape[1]))]


@reference("npu_grouped_matmul_add_")
def grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """input [E, M, N] (or [E * M, N]) float32 += x [K, M] transposed times weight [K, N], group by group of K.

    torch_npu 2.5.1 has no ``group_list_type``, and the kernel of CANN 8.2 reads running ends only. A group without rows
    leaves its part of ``input`` as it is.
    """
    require(transpose_x and not transpose_weight and group_type == SPLIT_INNER, OP_ADD, "x transposed, inner split")
    require(group_list_type == ENDS, OP_ADD, "wants running ends")
    require_floats(OP_ADD, x, weight)
    require(x.dtype != torch.float32, OP_ADD, "wants float16 or bfloat16 factors")
    require(input.dtype == torch.float32 and input.is_contiguous(), OP_ADD, "adds to a contiguous float32 tensor")
    require(min(x.numel(), weight.numel(), input.numel()) > 0, OP_ADD, "wants tensors that are not empty")
    require(x.dim() == weight.dim() == 2 and len(x) == len(weight), OP_ADD, "x and weight differ in their rows")
    require(group_list.dtype == torch.int64, OP_ADD, "wants int64 groups on the device")
    require(len(group_list) <= MAX_ADDED_GROUPS, OP_ADD, f"{len(group_list)} groups, at most {MAX_ADDED_GROUPS}")
    bounds = _bounds(group_list, group_list_type, len(x))
    require(bounds[-1][1] == len(x), OP_ADD, f"the last group ends at {bounds[-1][1]} of {len(x)}")
    shape = (len(bounds), x.shape[1], weight.shape[1])
    require(input.shape in (shape, (shape[0] * shape[1], shape[2])), OP_ADD, f"input is not {shape}")
    for target, (begin, end) in zip(input.view(shape), bounds, strict=True):
        target += (x[begin:end].t().double() @ weight[begin:end].double()).float()
    return input


def _split_rows(rows: Tensor, weight: list[Tensor], bounds: list[tuple[int, int]]) -> Tensor:
    matrices = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    require(len(matrices) == len(bounds), OP, f"{len(matrices)} matrices for {len(bounds)} groups")
    out = unwritten(rows, len(rows), matrices[0].shape[-1])
    for (begin, end), matrix in zip(bounds, matrices, strict=True):
        out[begin:end] = (rows[begin:end].double() @ matrix.double()).to(rows.dtype)
    return out


def _split_inner(rows: Tensor, weight: list[Tensor], bounds: list[tuple[int, int]]) -> Tensor:
    require(len(weight) == 1 and weight[0].dim() == 2, OP, "a split inner dimension wants one 2-D weight")
    require(rows.t().is_contiguous(), OP, "a split inner dimension wants a transposed x")
    require(len(weight[0]) == rows.shape[1], OP, "x and weight differ in their inner dimension")
    out = unwritten(rows, len(bounds), len(rows), weight[0].shape[1])
    for index, (begin, end) in enumerate(bounds):
        if end > begin:
            out[index] = (rows[:, begin:end].double() @ weight[0][begin:end].double()).to(rows.dtype)
    return out


def _bounds(group_list: Tensor, kind: int | None, size: int) -> list[tuple[int, int]]:
    """[begin, end) of each group."""
    require(kind in (ENDS, COUNTS) and group_list.dim() == 1, OP, f"group_list_type {kind} is not simulated")
    require(0 < len(group_list) <= MAX_GROUPS, OP, f"{len(group_list)} groups, at most {MAX_GROUPS}")
    ends = (group_list.cumsum(0) if kind == COUNTS else group_list).tolist()
    bounds = list(itertools.pairwise([0, *ends]))
    require(all(begin <= end for begin, end in bounds), OP, f"groups {group_list.tolist()} are negative")
    require(ends[-1] <= size, OP, f"groups end at {ends[-1]}, past {size}")
    return bounds
