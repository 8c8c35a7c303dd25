"""FP8 products on NVIDIA devices: weights in 128 x 128 blocks, activations quantised here for each token and 128
channels (vllm/ops/reference_fp8.py).

Limits: weights whose blocks are whole along the inputs and whose inputs lie side by side in memory; devices with FP8
tensor cores that take every tile (compute capability 9 and 10). Tolerance: 1e-5 (float32), 1e-2 (bfloat16).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE
from vllm.ops.cuda.launch import Launch, num_processors, tile_for
from vllm.ops.weights import Fp8Operand, block_scales_of
from vllm.utils import last_contiguous

_CAPABILITIES = (9, 10)  # Hopper and Blackwell of data centres
_MOST_SPLITS = 4  # each more writes and reads the product once more, in fp32
_LEAST_BLOCKS = 4  # of 128 channels that a program adds up
_TILE_BLOCKS = 8  # of 128 channels that a program quantises


class Fp8Rows(NamedTuple):
    """Quantised activations: e4m3 [T, I] and the scales of 128 channels, fp32 [C, T]."""

    values_TI: Tensor
    scale_CT: Tensor


def has_fp8_products() -> bool:
    """Whether this process's device multiplies FP8, as Triton's interpreter does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in _CAPABILITIES


def fits(weight: Tensor) -> bool:
    """See ``RolloutOps.takes_fp8``."""
    scales = block_scales_of(weight)
    return scales is not None and scales.column_blocks_C is None and weight.is_contiguous()


class Fp8Products:
    """Products of rows with the operands that ``fits`` allows."""

    implementation = "FP8 kernels"

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def linear(self, x_TI: Tensor, weight_OI: Fp8Operand) -> Tensor:
        """See ``RolloutOps.linear``."""
        rows = self.quantize(last_contiguous(x_TI.to(weight_OI.dtype)))
        return self._product(rows, weight_OI, len(x_TI), None, None)

    def quantize(self, x_TI: Tensor) -> Fp8Rows:
        """x may be a strided slice of columns."""
        tokens, inputs = x_TI.shape
        rows = self._new_rows(x_TI, tokens, inputs)
        self._for_blocks("quantize_rows", rows, x_TI, x_TI.stride(0))
        return rows

    def silu_and_mul(self, x_T2F: Tensor, num_rows: Tensor) -> Fp8Rows:
        """``RolloutOps.silu_and_mul``, quantised; rows from ``num_rows`` (int32, on the device) on are anything."""
        rows = self._new_rows(x_T2F, len(x_T2F), x_T2F.shape[1] // 2)
        self._for_blocks("silu_and_mul_quantized", rows, x_T2F, num_rows)
        return rows

    def grouped(self, x: Fp8Rows, weight_EOI: Fp8Operand, ends_E: Tensor, source_S: Tensor | None) -> Tensor:
        """Return [S, O]: row s of x, or row source[s], by the matrix of the expert whose rows end after s.

        Rows past the last end are anything.
        """
        return self._product(x, weight_EOI, len(x.values_TI) if source_S is None else len(source_S), ends_E, source_S)

    def _product(
        self, x: Fp8Rows, weight: Fp8Operand, num_rows: int, ends_E: Tensor | None, source_S: Tensor | None
    ) -> Tensor:
        experts, (outputs, inputs) = (1 if ends_E is None else len(weight)), weight.shape[-2:]
        scale_inv = weight.scales.scale_inv
        # A tile reads its weights once for up to 128 tokens, and twice the mean of few is enough for most experts. Few
        # tokens: what counts is that the weights come from memory at its full rate, which takes two programs for each
        # processor, of a fourth of the channels if need be.
        mean = -(-num_rows // experts)
        tile_T = min(tile_for(mean if ends_E is None else max(mean, min(2 * mean, 64)), least=16), 128)
        tile_O = 64 if tile_T <= 64 else 128
        tiles_T, tiles_O = -(-num_rows // tile_T) + (experts if ends_E is not None else 0), -(-outputs // tile_O)
        busy = tiles_O * (-(-num_rows // tile_T) if ends_E is None else min(experts, num_rows))
        most = min(_MOST_SPLITS, inputs // (BLOCK * _LEAST_BLOCKS))
        splits = max(1, min(most, 2 * num_processors(scale_inv.device) // max(1, busy)))
        out = scale_inv.new_empty(num_rows, outputs, dtype=weight.dtype)
        parts = out if splits == 1 else scale_inv.new_empty(splits, num_rows, outputs)
        self._launch(
            "block_product",
            (tiles_T * tiles_O * (num_rows > 0), splits),
            *(x.values_TI, x.scale_CT, len(x.values_TI)),
            x.scale_CT if source_S is None else source_S,
            *(weight.values, scale_inv, weight.scales.row_blocks_R, scale_inv.shape[-2]),
            *(x.scale_CT if ends_E is None else ends_E, parts, num_rows, tiles_T),
            HAS_ROWS=source_S is not None,
            HAS_EXPERTS=ends_E is not None,
            E=experts,
            O=outputs,
            C=inputs // BLOCK,
            SPLITS=splits,
            TILE_E=tile_for(experts),
            TILE_T=tile_T,
            TILE_O=tile_O,
            num_warps=4 if tile_O == 64 else 8,
            num_stages=4,
        )
        if splits > 1:
            size = num_rows * outputs
            self._launch("sum_of_splits", (-(-size // 1024),), parts, out, size, SPLITS=splits, TILE=1024)
        return out

    def _new_rows(self, x: Tensor, num_rows: int, width: int) -> Fp8Rows:
        assert width % BLOCK == 0, width
        values = x.new_empty(num_rows, width, dtype=FP8_DTYPE)
        return Fp8Rows(values, x.new_empty(width // BLOCK, num_rows, dtype=torch.float32))

    def _for_blocks(self, name: str, rows: Fp8Rows, x: Tensor, limit: Tensor | int) -> None:
        blocks, tokens = rows.scale_CT.shape
        tile = min(tile_for(blocks), _TILE_BLOCKS)
        self._launch(name, (tokens, -(-blocks // tile)), x, limit, *rows, tokens, C=blocks, TILE_C=tile)
