"""How an op table holds the weights of its products: as tensors, or in a form that only its own ops read.

Linear and expert layers ask the table for memory (`RolloutOps.new_weight`) and hand it back to the table's ops without
looking inside. Letters: E experts, O outputs, I inputs, R rows and C columns of one matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_formats.fp8 import BLOCK


class PackedWeight(nn.Module, ABC):
    """Matrices [R, C] of one layer in a form of the op table's own: `num_parts` of each of `num_experts` experts.

    Loaders write and read whole matrices. `memory` and `loose_tensors` are all that it holds.
    """

    memory: nn.Parameter

    def __init__(self, num_experts: int, num_parts: int, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.num_parts, self.rows, self.columns = num_experts, num_parts, rows, columns
        self.dtype = dtype

    def __len__(self) -> int:
        return self.num_experts

    def rows_of(self, index: int) -> int:
        """R of matrix `index`."""
        return self.rows

    @property
    def loose_tensors(self) -> Sequence[Tensor]:
        """Tensors beside `memory` that hold values now."""
        return ()

    @abstractmethod
    def write(self, index: int, values_RC: Tensor) -> None:
        """Replace matrix `index` = expert * num_parts + part by values of `dtype`; their memory is not kept."""

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """Return a copy of matrix `index`, [R, C] of `dtype`."""

    def matrix(self, expert: int, part: int) -> PackedMatrix:
        return PackedMatrix(self, expert * self.num_parts + part)


class PackedMatrix:
    """One matrix of a `PackedWeight`, with a tensor's properties."""

    def __init__(self, weight: PackedWeight, index: int) -> None:
        self._weight, self._index = weight, index
        self.shape, self.dtype = torch.Size((weight.rows_of(index), weight.columns)), weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.memory.device

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def write(self, values_RC: Tensor) -> None:
        """See `PackedWeight.write`."""
        self._weight.write(self._index, values_RC)

    def read(self) -> Tensor:
        """See `PackedWeight.read`."""
        return self._weight.read(self._index)


Weight: TypeAlias = nn.Parameter | PackedWeight


NewWeight: TypeAlias = Callable[..., Weight]
"""Makes the weight of one layer, uninitialised, in torch's default dtype and on its default device:

new_weight(out_sizes, in_size, num_experts=None, *, by_row=False, may_pack=True) -> [sum(out_sizes), in_size], matrices
of one input one below the other, or that of each expert.

by_row: its rows are also looked up (`RolloutOps.embedding`).
may_pack: whether it may be a `PackedWeight`, with one part for each of `out_sizes`.
"""


def new_plain_weight(
    out_sizes: Sequence[int],
    in_size: int,
    num_experts: int | None = None,
    *,
    by_row: bool = False,
    may_pack: bool = True,
) -> Weight:
    """Return a parameter [(E,) O, I] whose memory is [(E,) I, O], as grouped products want it; by row [(E,) O, I]."""
    experts = () if num_experts is None else (num_experts,)
    if by_row:
        return nn.Parameter(torch.empty(*experts, sum(out_sizes), in_size), requires_grad=False)
    return nn.Parameter(torch.empty(*experts, in_size, sum(out_sizes)).transpose(-1, -2), requires_grad=False)


new_row_major_weight: NewWeight = partial(new_plain_weight, by_row=True)
"""Makes parameters [(E,) O, I] whose memory is in this order: both factors of x weight^T then have their inputs side by
side, the one order that tensor cores take of FP8.
"""


@dataclass(frozen=True)
class BlockScales:
    """What turns an e4m3 parameter [..., R, C] back: element (r, c) times scale_inv[..., row_blocks[r], its column's].

    The blocks are those of the whole Hugging Face tensors, wherever this rank's slices of them begin.
    """

    scale_inv: Tensor  # fp32 [..., SR, SC]
    row_blocks_R: Tensor  # int64
    column_blocks_C: Tensor | None  # int64; None: whole blocks from the first column on
    dtype: torch.dtype  # of products
    has_whole_row_blocks: bool = False  # whether row r's is r // 128, as far as the host knows


def block_scales_of(weight: Tensor | PackedWeight) -> BlockScales | None:
    """Return the scales of a weight that is held in FP8 blocks, None for any other weight."""
    scales: BlockScales | None = getattr(weight, "block_scales", None)
    return scales


@dataclass(frozen=True)
class Fp8Operand:
    """A weight in FP8 blocks as products with FP8 activations take it (`vllm.ops.reference_fp8`): its own memory."""

    values: Tensor  # e4m3 [(E,) O, I]
    scales: BlockScales

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations and the results."""
        return self.scales.dtype


def dense(weight: Tensor | PackedWeight) -> Any:
    """Return a weight as products of its dtype take it: itself, or dequantised, in its memory order, when it is held in
    FP8.
    """
    scales = block_scales_of(weight)
    if scales is None:
        return weight
    assert isinstance(weight, Tensor)
    out = weight.to(scales.dtype)  # exact
    rows = scales.scale_inv.index_select(-2, scales.row_blocks_R)
    if scales.column_blocks_C is None:
        out.unflatten(-1, (-1, BLOCK)).mul_(rows.unsqueeze(-1))
    else:
        out.mul_(rows.index_select(-1, scales.column_blocks_C))
    return out


class WeightCopies(nn.Module):
    """Contiguous copies of each head's rows of a weight [N * (sum of `rows`), C]: one [N, rows, C] for each of `rows`.

    `renew` follows new values of the weight in place, so captured steps keep their addresses. The copies sleep with the
    weights; digests and loaders know the weight alone.
    """

    def __init__(self, weight: nn.Parameter, num_heads: int, rows: Sequence[int]) -> None:
        super().__init__()
        self.weight, self.rows = weight, list(rows)
        self.tensors = [weight.new_empty(num_heads, size, weight.shape[1]) for size in rows]

    def renew(self) -> None:
        """Take the values that the weight has now."""
        parts = dense(self.weight).view(len(self.tensors[0]), sum(self.rows), -1).split(self.rows, dim=1)
        for copy, part in zip(self.tensors, parts, strict=True):
            copy.copy_(part)
