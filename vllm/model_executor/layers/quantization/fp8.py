"""DeepSeek's block-wise FP8 weights: e4m3 values with one fp32 scale per 128 x 128 block (arXiv:2412.19437 sec. 3.3).

Activations stay in the model's dtype: a product takes the weight's blocks multiplied out, rounded once to that dtype.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3fn value
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_QUANTIZED = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")


class Fp8Blocks(NamedTuple):
    """A weight as a checkpoint stores it: e4m3 [O, I] and fp32 [ceil(O/128), ceil(I/128)]."""

    weight_OI: Tensor
    scale_inv: Tensor


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
    """fp32(value) * scale of its block, rounded once to `dtype`; [O, I]."""
    rows, columns = blocks.weight_OI.shape
    scaled = _blocks(blocks.weight_OI.float()).mul_(blocks.scale_inv[:, None, :, None])
    return scaled.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype)


def check_scales(name: str, blocks: Fp8Blocks) -> None:
    """ValueError when the scales are not those of 128 x 128 blocks, or one is not a positive number."""
    expected = tuple(map(num_blocks, blocks.weight_OI.shape))
    if tuple(blocks.scale_inv.shape) != expected:
        raise ValueError(
            f"weight {name}{SCALE_SUFFIX} has shape {tuple(blocks.scale_inv.shape)}; {name} of shape "
            f"{tuple(blocks.weight_OI.shape)} in {BLOCK} x {BLOCK} blocks needs {expected}"
        )
    is_bad = ~((blocks.scale_inv > 0) & torch.isfinite(blocks.scale_inv))
    if bool(is_bad.any()):
        block = tuple(is_bad.nonzero()[0].tolist())
        raise ValueError(
            f"weight {name}{SCALE_SUFFIX} is {float(blocks.scale_inv[block])} for block {block}; scales must be "
            "positive and finite (a block of zeros has scale 1)"
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
