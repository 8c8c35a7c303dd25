"""DeepSeek's block-wise FP8 weights: e4m3 values, one fp32 scale per 128 x 128 block (arXiv:2412.19437, sec. 3.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3fn value
BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
_QUANTIZED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.([qkvo]_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)"
    r"|mlp\.((experts\.\d+|shared_experts)\.)?(gate_proj|up_proj|down_proj))\.weight"
)
_CACHED_ELEMENTS = 1 << 17  # this many fp32 values stay in a core's second-level cache


class Fp8Blocks(NamedTuple):
    """A slice of an FP8 weight: e4m3 [O, I], which begins ``starts`` inside its first block, and the fp32 scales of the
    blocks that it touches."""

    weight_OI: Tensor
    scale_inv: Tensor
    starts: tuple[int, int] = (0, 0)


class Sliceable(Protocol):
    """A tensor, or one that is still in its file and is read by slicing it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor: ...


class Fp8Weight(NamedTuple):
    """A whole weight as a checkpoint stores it: e4m3 [O, I] and fp32 [ceil(O/128), ceil(I/128)]."""

    weight_OI: Sliceable
    scale_inv: Sliceable

    def cut(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> Fp8Blocks:
        """Return a slice with the scales of its blocks; ValueError when a scale is not positive and finite."""
        (r0, r1), (c0, c1) = rows, columns
        (br0, br1), (bc0, bc1) = touched(r0, r1), touched(c0, c1)
        values = self.weight_OI[r0:r1, c0:c1]
        scales = self.scale_inv[br0:br1, bc0:bc1].to(values.device, torch.float32)
        check_scale_values(name, scales, (br0, bc0))
        return Fp8Blocks(values, scales, (r0 % BLOCK, c0 % BLOCK))


def is_quantized(hf_name: str) -> bool:
    """Whether FP8 checkpoints quantise this tensor: linear weights of attention, MLPs and experts.

    Embeddings, lm_head, norms, the router with its bias, and the MTP layer's eh_proj stay in BF16 or FP32.
    """
    return _QUANTIZED.fullmatch(hf_name) is not None


def quantization_problems(config: Mapping[str, Any]) -> list[str]:
    """Return what a config.json's ``quantization_config`` asks for beside this format, one sentence per key."""
    asked = config.get("quantization_config") or {}
    if not asked:
        return []
    expected = {key: QUANTIZATION_CONFIG[key] for key in ("quant_method", "fmt", "weight_block_size")}
    return [
        f"quantization_config.{key}={asked.get(key)!r} is not supported, expected {value!r}"
        for key, value in expected.items()
        if asked.get(key, value if key == "fmt" else None) != value
    ]


def num_blocks(size: int) -> int:
    """Return the number of blocks along a dimension of ``size``."""
    return -(-size // BLOCK)


def touched(start: int, stop: int) -> tuple[int, int]:
    """Return the [first, end) blocks that [start, stop) touches."""
    return start // BLOCK, num_blocks(stop)


def quantize(weight_OI: Tensor) -> Fp8Blocks:
    """Quantise a whole weight with scale_inv = max|block| / 448, and 1 for a block of zeros.

    ValueError for anything but a finite matrix.
    """
    if weight_OI.dim() != 2:
        raise ValueError(f"block-wise FP8 needs a matrix; the weight has shape {tuple(weight_OI.shape)}")
    blocks = _blocks(weight_OI.float())
    peak = blocks.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(peak).all()):
        raise ValueError(f"the weight of shape {tuple(weight_OI.shape)} holds inf or nan and cannot be quantised")
    scale = scales_of_peaks(peak)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    rows, columns = weight_OI.shape
    padded = scaled.flatten(2).flatten(0, 1)
    return Fp8Blocks(padded[:rows, :columns].to(FP8_DTYPE).contiguous(), scale.contiguous())


def scales_of_peaks(peak: Tensor) -> Tensor:
    """Return the fp32 scales (scale_inv) of blocks whose largest magnitudes are ``peak``."""
    scale = peak / torch.full_like(peak, FP8_MAX)  # by a number, a GPU multiplies by its rounded inverse
    # A subnormal scale would lose the block's precision or underflow to 0: the block counts as zero.
    return torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)


def dequantize(blocks: Fp8Blocks, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return fp32(value) * scale of its block, rounded once to ``dtype``; shape [O, I]."""
    out_OI = torch.empty(blocks.weight_OI.shape, dtype=dtype, device=blocks.weight_OI.device)
    dequantize_into(out_OI, blocks)
    return out_OI


def dequantize_into(out_OI: Tensor, blocks: Fp8Blocks) -> None:
    """Do the work of ``dequantize`` through a small buffer, which stays in the cache of a CPU."""
    weight_OI = blocks.weight_OI
    columns = weight_OI.shape[1]
    step = min(BLOCK, max(1, _CACHED_ELEMENTS // max(1, columns))) if weight_OI.is_cpu else BLOCK
    buffer = torch.empty((step, columns), dtype=torch.float32, device=weight_OI.device)
    for start, stop, scales_I in row_scales(blocks, step):
        scaled = buffer[: stop - start]
        scaled.copy_(weight_OI[start:stop])
        out_OI[start:stop] = scaled.mul_(scales_I)


def row_scales(blocks: Fp8Blocks, max_rows: int = BLOCK) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, end row, fp32 scale of each column) for runs of rows that share their blocks.

    ValueError when the scales have another shape than the blocks that the slice touches.
    """
    (rows, columns), (row, column) = blocks.weight_OI.shape, blocks.starts
    expected = (num_blocks(row + rows), num_blocks(column + columns))
    if tuple(blocks.scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv has shape {tuple(blocks.scale_inv.shape)}; a weight of shape {(rows, columns)} in {BLOCK} x "
            f"{BLOCK} blocks needs {expected}"
        )
    scales_BI = blocks.scale_inv.float().repeat_interleave(BLOCK, dim=1)[:, column : column + columns]
    start = 0
    while start < rows:
        block = (row + start) // BLOCK
        stop = min(start + max_rows, rows, (block + 1) * BLOCK - row)
        yield start, stop, scales_BI[block]
        start = stop


def check_scale_shape(name: str, weight_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
    """Raise a ValueError when the scales of weight ``name`` are not those of 128 x 128 blocks."""
    expected = tuple(map(num_blocks, weight_shape))
    if tuple(scale_shape) != expected:
        raise ValueError(
            f"weight {name}{SCALE_SUFFIX} has shape {tuple(scale_shape)}; {name} of shape {tuple(weight_shape)} in "
            f"{BLOCK} x {BLOCK} blocks needs {expected}"
        )


def check_scale_values(name: str, scales: Tensor, first_block: tuple[int, int]) -> None:
    """Raise a ValueError when a scale of weight ``name`` is not positive and finite; ``scales`` begin at a block."""
    is_bad = ~((scales > 0) & torch.isfinite(scales))
    if bool(is_bad.any()):
        row, column = is_bad.nonzero()[0].tolist()
        block = (first_block[0] + row, first_block[1] + column)
        raise ValueError(
            f"weight {name}{SCALE_SUFFIX} is {float(scales[row, column])} for block {block}; scales must be positive "
            "and finite (a block of zeros has scale 1); fetch the checkpoint again"
        )


def _blocks(weight_OI: Tensor) -> Tensor:
    """Return the weight as [row blocks, 128, column blocks, 128], padded with zeros to whole blocks."""
    rows, columns = weight_OI.shape
    padded = weight_OI
    if rows % BLOCK or columns % BLOCK:
        padded = torch.nn.functional.pad(weight_OI, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
