"""DeepSeek's block-wise FP8 weights: e4m3 values with one fp32 scale per 128 x 128 block (arXiv:2412.19437 sec. 3.3).

Activations stay in the model's dtype: a product takes the weight's blocks multiplied out, rounded once to that dtype.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3fn value
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_QUANTIZED = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")


class Sliceable(Protocol):
    """A tensor, or one that lies in a file: to slice it is to read the slice."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


class Fp8Blocks(NamedTuple):
    """e4m3 [O, I], which begins `starts` behind the corner of its first block, and the fp32 scale of each block that it
    touches.
    """

    weight_OI: Tensor
    scale_inv: Tensor
    starts: tuple[int, int] = (0, 0)


class Fp8Weight(NamedTuple):
    """A weight as a checkpoint stores it: e4m3 [O, I] and fp32 [ceil(O/128), ceil(I/128)]."""

    weight_OI: Sliceable
    scale_inv: Sliceable

    def cut(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Fp8Blocks:
        """A slice with the scales that it touches; ValueError when one of them is not positive and finite."""
        (r0, r1), (c0, c1) = rows, columns
        (br0, br1), (bc0, bc1) = touched(r0, r1), touched(c0, c1)
        values = self.weight_OI[r0:r1, c0:c1]
        scales = self.scale_inv[br0:br1, bc0:bc1].to(values.device, torch.float32)
        is_bad = ~((scales > 0) & torch.isfinite(scales))
        if bool(is_bad.any()):
            row, column = is_bad.nonzero()[0].tolist()
            raise ValueError(
                f"weight {name}{SCALE_SUFFIX} is {float(scales[row, column])} for block {(br0 + row, bc0 + column)}; "
                "scales must be positive and finite (a block of zeros has scale 1)"
            )
        return Fp8Blocks(values, scales, (r0 % BLOCK, c0 % BLOCK))


@dataclass(frozen=True)
class BlockScales:
    """What turns an e4m3 parameter [..., R, C] back: element (r, c) times scale_inv[..., row_blocks[r], its column's].

    The blocks are those of the whole Hugging Face tensors, wherever this rank's slices of them begin.
    """

    scale_inv: Tensor  # fp32 [..., SR, SC]
    row_blocks_R: Tensor  # int64
    column_blocks_C: Tensor | None  # int64; None: whole blocks from the first column on
    dtype: torch.dtype  # of products


def is_quantized(hf_name: str) -> bool:
    """Whether FP8 checkpoints quantise this tensor: linear weights of attention, MLPs and experts."""
    return _QUANTIZED.fullmatch(hf_name) is not None


def num_blocks(size: int) -> int:
    """Blocks along a dimension of `size`."""
    return -(-size // BLOCK)


def touched(start: int, stop: int) -> tuple[int, int]:
    """[first, end) of the blocks that [start, stop) touches."""
    return start // BLOCK, num_blocks(stop)


def quantize(weight_OI: Tensor) -> Fp8Blocks:
    """scale_inv = max|block| / 448, 1 for a block of zeros (or of values too small to divide by); ValueError for inf or
    nan.
    """
    blocks = _blocks(weight_OI.float())
    peak = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(peak).all()):
        raise ValueError("it holds inf or nan and cannot be quantised")
    scale = scales_of_peaks(peak)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    rows, columns = weight_OI.shape
    return Fp8Blocks(scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(FP8_DTYPE), scale)


def scales_of_peaks(peak: Tensor) -> Tensor:
    """Scales (scale_inv) of blocks whose largest magnitudes are `peak`, fp32."""
    scale = peak / FP8_MAX
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def dequantize(blocks: Fp8Blocks, dtype: torch.dtype) -> Tensor:
    """fp32(value) * scale of its block, rounded once to `dtype`; [O, I]. A row of blocks is widened at a time."""
    weight_OI, scale_inv, (skipped_rows, skipped_columns) = blocks
    rows, columns = weight_OI.shape
    column_blocks = torch.arange(skipped_columns, skipped_columns + columns, device=scale_inv.device) // BLOCK
    out = torch.empty((rows, columns), dtype=dtype, device=weight_OI.device)
    for block, scale in enumerate(scale_inv):
        part = slice(max(0, block * BLOCK - skipped_rows), (block + 1) * BLOCK - skipped_rows)
        out[part] = weight_OI[part].float().mul_(scale[column_blocks])
    return out


def check_scales(name: str, weight: Fp8Weight) -> None:
    """ValueError when the scales are not those of 128 x 128 blocks."""
    expected = tuple(map(num_blocks, weight.weight_OI.shape))
    if tuple(weight.scale_inv.shape) != expected:
        raise ValueError(
            f"weight {name}{SCALE_SUFFIX} has shape {tuple(weight.scale_inv.shape)}; {name} of shape "
            f"{tuple(weight.weight_OI.shape)} in {BLOCK} x {BLOCK} blocks needs {expected}"
        )


def dense(weight: Tensor) -> Tensor:
    """A parameter as products take it: itself, or multiplied out in its product dtype and memory order when it is held
    in FP8.
    """
    scales: BlockScales | None = getattr(weight, "block_scales", None)
    if scales is None:
        return weight
    out = weight.to(scales.dtype)  # exact
    rows = scales.scale_inv.index_select(-2, scales.row_blocks_R)
    if scales.column_blocks_C is None:
        out.unflatten(-1, (-1, BLOCK)).mul_(rows.unsqueeze(-1))
    else:
        out.mul_(rows.index_select(-1, scales.column_blocks_C))
    return out


def _blocks(weight_OI: Tensor) -> Tensor:
    """A copy or view as [row blocks, 128, column blocks, 128], padded with zeros to whole blocks."""
    rows, columns = weight_OI.shape
    padded = torch.nn.functional.pad(weight_OI, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
