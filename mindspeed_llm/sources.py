"""Reading weights through the plan: what a source of HF tensors offers, and how pieces fill a local tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, Fp8Blocks, check_scale_values, dequantize_into, touched
from mindspeed_llm.weight_plan import Fragment, LocalTensor, Piece, Slice, slice_shape

_SHOWN_NAMES = 4


Origin = tuple[int, int]
Place = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Origin], None]


class WeightSource(Protocol):
    """Anything that can hand out slices of tensors under HF names."""

    def names(self) -> Collection[str]:
        """HF names that can be read."""
        ...

    def dtype(self, hf_name: str) -> torch.dtype:
        """Dtype in which the tensor is stored."""
        ...

    def read(self, hf_name: str, hf_slice: Slice) -> torch.Tensor:
        """The slice, on the CPU in its stored dtype; it may share memory with the source, so do not write to it."""
        ...


def hf_view(local: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of ``local`` that ``piece`` fills, as a view in the orientation of the HF tensor."""
    view = local[tuple(slice(start, stop) for start, stop in piece.local_slice)]
    if view.dim() > len(piece.hf_slice):
        view = view.squeeze(0)
    return view.T if piece.transpose else view


def plain_dtype(source: WeightSource, hf_name: str) -> torch.dtype:
    """Dtype of a tensor as it is computed with: that in which it is stored, BF16 for FP8."""
    dtype = source.dtype(hf_name)
    return torch.bfloat16 if dtype == FP8_DTYPE else dtype


def stored_dtype(source: WeightSource, tensor: LocalTensor) -> torch.dtype:
    """The one plain dtype of all that ``tensor`` is made of; ValueError when there are several."""
    dtypes = {plain_dtype(source, piece.hf_name) for piece in tensor.pieces}
    if len(dtypes) > 1:
        names = ", ".join(piece.hf_name for piece in tensor.pieces[:_SHOWN_NAMES])
        raise ValueError(f"{tensor.name} is made of tensors of different dtypes {dtypes}: {names} ...")
    return dtypes.pop()


def place(target: torch.Tensor, fragment: torch.Tensor, scale_inv: torch.Tensor | None, origin: Origin) -> None:
    """``target[...] = fragment``, cast; dequantised when there are scales, of a fragment that begins at ``origin``."""
    if scale_inv is None:
        target.copy_(fragment)
    else:
        dequantize_into(target, Fp8Blocks(fragment, scale_inv, (origin[0] % BLOCK, origin[1] % BLOCK)))


def fill(local: torch.Tensor, tensor: LocalTensor, source: WeightSource, place: Place = place) -> None:
    """Copy every piece of ``tensor`` from ``source`` into ``local`` (shape ``tensor.shape``), casting to its dtype.

    FP8 weights are multiplied by the scales of the blocks that a piece touches and rounded once. ``place`` is the loop
    that moves a piece; another one gives the same bits faster.
    """
    for piece in tensor.pieces:
        fragment, target = source.read(piece.hf_name, piece.hf_slice), hf_view(local, piece)
        if fragment.dtype != FP8_DTYPE:
            place(target, fragment, None, (0, 0))
            continue
        if piece.hf_name + SCALE_SUFFIX not in source.names():
            raise ValueError(f"{piece.hf_name} is FP8 and has no {SCALE_SUFFIX}; fetch the checkpoint again")
        (row, row_end), (column, column_end) = piece.hf_slice
        blocks = (touched(row, row_end), touched(column, column_end))
        scales = source.read(piece.hf_name + SCALE_SUFFIX, blocks)
        check_scale_values(piece.hf_name, scales, (blocks[0][0], blocks[1][0]))
        place(target, fragment, scales, (row, column))


def assemble(
    what: str, wanted: Slice, parts: Sequence[Fragment], read: Callable[[Fragment, Slice], torch.Tensor]
) -> torch.Tensor:
    """The slice ``wanted`` of an HF tensor from its ``parts``; ``read`` returns what a part has of a slice.

    What one part holds alone is passed on as ``read`` returned it. ValueError for elements that nobody holds.
    """
    result: torch.Tensor | None = None
    num_found = 0
    for part in parts:
        common = intersection(part.piece.hf_slice, wanted)
        if common is None:
            continue
        found = read(part, common)
        if common == wanted:
            return found
        if result is None:
            result = torch.empty(slice_shape(wanted), dtype=found.dtype)
        result[relative(common, wanted)] = found
        num_found += found.numel()
    if result is None or num_found != result.numel():
        raise ValueError(f"{what} has no elements at {wanted}")
    return result


def intersection(left: Slice, right: Slice) -> Slice | None:
    """What two slices have in common, None when that is nothing."""
    if left == right:
        return left  # most are: of a large model, whole experts
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(inner: Slice, outer: Slice) -> tuple[slice, ...]:
    """The index of ``inner`` in a tensor that holds ``outer``."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
