"""FP8 products on NVIDIA devices: weights in 128 x 128 blocks, activations quantised here for each token and 128
channels (vllm/ops/reference_fp8.py). Linear layers of many tokens are cuBLAS's where it has such products.

Limits: weights whose blocks are whole along the inputs and whose inputs lie side by side in memory; devices with FP8
tensor cores that take every tile (compute capability 9 and 10). Tolerance: 1e-5 (float32), 1e-2 (bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
_CUBLAS_TOKENS = 1024  # from which on cuBLAS is quicker
_WIDE_OUTPUTS = 1 << 22  # of a product in tiles of 128 x 256: fewer leave processors idle

ScaledMM = Callable[..., Tensor]


class Fp8Rows(NamedTuple):
    """Quantised activations: e4m3 [T, I] and the scales of 128 channels, fp32 [C, T]."""

    values_TI: Tensor
    scale_CT: Tensor


def has_fp8_products() -> bool:
    """Whether this process's device multiplies FP8, as Triton's interpreter does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in _CAPABILITIES


def scaled_mm() -> ScaledMM | None:
    """torch's products by cuBLAS, where both have those of blocks: on Hopper, by CUDA 12.9 and later."""
    version = tuple(map(int, (torch.version.cuda or "0").split(".")))
    has_blocks = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and version >= (12, 9)
    return torch._scaled_mm if has_blocks else None


def fits(weight: Tensor) -> bool:
    """See ``RolloutOps.takes_fp8``."""
    scales = block_scales_of(weight)
    return scales is not None and scales.column_blocks_C is None and weight.is_contiguous()


def _suits_cublas(weight: Fp8Operand) -> bool:
    outputs, inputs = weight.shape
    is_whole = outputs % 16 == 0 and inputs % (4 * BLOCK) == 0
    return is_whole and weight.dtype is torch.bfloat16 and weight.scales.has_whole_row_blocks


def _tiles_of(values: Tensor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(values.view(-1, values.shape[-1]), [BLOCK, BLOCK])


class Fp8Products:
    """Products of rows with the operands that ``fits`` allows."""

    implementation = "FP8 kernels"

    def __init__(self, launch: Launch, scaled_mm: ScaledMM | None = None) -> None:
        self._launch, self._scaled_mm = launch, scaled_mm
        if scaled_mm is not None:
            self.implementation = "FP8 kernels, cuBLAS for many tokens"

    def linear(self, x_TI: Tensor, weight_OI: Fp8Operand) -> Tensor:
        """See ``RolloutOps.linear``."""
        x_TI = last_contiguous(x_TI.to(weight_OI.dtype))
        if self._scaled_mm is None or len(x_TI) < _CUBLAS_TOKENS or not _suits_cublas(weight_OI):
            return self._product(self.quantize(x_TI), weight_OI, len(x_TI), None, None)
        rows = self.quantize(x_TI, -(-len(x_TI) // 4) * 4)  # cuBLAS reads scales by 16 bytes; rows beyond are anything
        scales = {"scale_a": rows.scale_CT.t(), "scale_b": weight_OI.scales.scale_inv.t()}
        return self._scaled_mm(rows.values_TI, weight_OI.values.t(), **scales, out_dtype=x_TI.dtype)[: len(x_TI)]

    def quantize(self, x_TI: Tensor, num_rows: int | None = None) -> Fp8Rows:
        """x may be a strided slice of columns; num_rows: with room for so many."""
        tokens, inputs = x_TI.shape
        rows = self._new_rows(x_TI, num_rows or tokens, inputs)
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
        is_wide = tile_T == 128 and weight.scales.has_whole_row_blocks and num_rows * outputs >= _WIDE_OUTPUTS
        tile_O = 256 if is_wide else tile_O
        tiles_T, tiles_O = -(-num_rows // tile_T) + (experts if ends_E is not None else 0), -(-outputs // tile_O)
        busy = tiles_O * (-(-num_rows // tile_T) if ends_E is None else min(experts, num_rows))
        most = min(_MOST_SPLITS, inputs // (BLOCK * _LEAST_BLOCKS))
        splits = 1 if is_wide else max(1, min(most, 2 * num_processors(scale_inv.device) // max(1, busy)))
        out = scale_inv.new_empty(num_rows, outputs, dtype=weight.dtype)
        parts = out if splits == 1 else scale_inv.new_empty(splits, num_rows, outputs)
        self._launch(
            "wide_product" if is_wide else "block_product",
            (tiles_T * tiles_O * (num_rows > 0), splits),
            *(x.values_TI, x.scale_CT, len(x.values_TI)),
            x.scale_CT if source_S is None else source_S,
            _tiles_of(weight.values) if is_wide else weight.values,
            *(scale_inv, weight.scales.row_blocks_R, scale_inv.shape[-2]),
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
        self._launch(name, (len(x), -(-blocks // tile)), x, limit, *rows, tokens, C=blocks, TILE_C=tile)
