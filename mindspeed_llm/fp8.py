"""DeepSeek's block-wise FP8: e4m3 weights with one fp32 scale per 128 x 128 block (DeepSeek-V3 report, section 3.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest finite e4m3fn value
BLOCK = 128
_CACHED_ELEMENTS = 1 << 17  # fp32 values that stay in a core's second-level cache
SCALE_SUFFIX = "_scale_inv"
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
_QUANTISED = re.compile(
    r"model\.layers\.\d+\.(self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"
    r"|mlp\.((experts\.\d+|shared_experts)\.)?(gate_proj|up_proj|down_proj))\.weight"
)


def is_quantised(hf_name: str) -> bool:
    """Whether DeepSeek publishes this tensor in FP8: linear weights of attention, MLPs and experts.

    Embeddings, lm_head, norms, the router with its bias, and the MTP layer's eh_proj stay in BF16 or FP32.
    """
    return _QUANTISED.fullmatch(hf_name) is not None


def quantize_fp8_blockwise(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [O, I], scale_inv fp32 [ceil(O/128), ceil(I/128)]) with scale_inv = max|block| / 448; 1 for zero blocks."""
    if weight_OI.dim() != 2:
        raise ValueError(f"block-wise FP8 needs a matrix; the weight has shape {tuple(weight_OI.shape)}")
    blocks = _blocks(weight_OI.float())
    peak = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(peak).all():
        raise ValueError(f"the weight of shape {tuple(weight_OI.shape)} holds inf or nan; it cannot be quantised")
    # A subnormal scale would lose the block's precision or underflow to 0; such a block is zero for every purpose.
    is_zero = peak / FP8_MAX < torch.finfo(torch.float32).tiny
    scale = torch.where(is_zero, torch.ones_like(peak), peak / FP8_MAX)
    scaled = (blocks / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    rows, columns = weight_OI.shape
    padded = scaled.reshape(scaled.shape[0] * BLOCK, scaled.shape[2] * BLOCK)
    return padded[:rows, :columns].to(FP8_DTYPE).contiguous(), scale.contiguous()


def dequantize(weight_OI: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """fp32(weight) * scale_inv of its 128 x 128 block, rounded once to ``dtype``; shape [O, I]."""
    out_OI = torch.empty(weight_OI.shape, dtype=dtype, device=weight_OI.device)
    dequantize_into(out_OI, weight_OI, scale_inv)
    return out_OI


def dequantize_into(
    out_OI: torch.Tensor, weight_OI: torch.Tensor, scale_inv: torch.Tensor, origin: tuple[int, int] = (0, 0)
) -> None:
    """``dequantize`` of a slice, into ``out_OI``: ``weight_OI`` begins at row and column ``origin`` of its matrix.

    ``scale_inv`` holds the scales of just the blocks that the slice touches. The work goes through a buffer that stays
    in the processor's cache; nothing of the slice's size is made.
    """
    columns = weight_OI.shape[1]
    step = min(BLOCK, max(1, _CACHED_ELEMENTS // max(1, columns)))
    buffer = torch.empty((step, columns), dtype=torch.float32, device=weight_OI.device)
    for start, stop, scales_I in row_scales(weight_OI, scale_inv, origin, step):
        scaled = buffer[: stop - start]
        scaled.copy_(weight_OI[start:stop])
        out_OI[start:stop] = scaled.mul_(scales_I)


def row_scales(
    weight_OI: torch.Tensor, scale_inv: torch.Tensor, origin: tuple[int, int], max_rows: int = BLOCK
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, row behind the last, fp32 scale of each column) of the slice's runs of rows of one block.

    ValueError when ``scale_inv`` has not the shape of the blocks that a slice at ``origin`` touches.
    """
    rows, columns = weight_OI.shape
    row, column = origin[0] % BLOCK, origin[1] % BLOCK
    expected = (-(-(row + rows) // BLOCK), -(-(column + columns) // BLOCK))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scale_inv has shape {tuple(scale_inv.shape)}; a weight of shape {(rows, columns)} in {BLOCK} x {BLOCK} "
            f"blocks needs {expected}"
        )
    scales_BI = scale_inv.float().repeat_interleave(BLOCK, dim=1)[:, column : column + columns]
    start = 0
    while start < rows:
        block = (row + start) // BLOCK
        stop = min(start + max_rows, rows, (block + 1) * BLOCK - row)
        yield start, stop, scales_BI[block]
        start = stop


def _blocks(weight_OI: torch.Tensor) -> torch.Tensor:
    """View as [row blocks, 128, column blocks, 128], zero-padded to whole blocks."""
    rows, columns = weight_OI.shape
    padded = weight_OI
    if rows % BLOCK or columns % BLOCK:
        padded = torch.nn.functional.pad(weight_OI, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
