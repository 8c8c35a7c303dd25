"""Weights that are held in FP8 blocks: their storage, and FP8 tensors on their way to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from hf_formats.fp8 import (
    BLOCK,
    FP8_DTYPE,
    SCALE_SUFFIX,
    Fp8Weight,
    is_quantized,
    num_blocks,
    quantize,
    touched,
)
from vllm.model_executor.layers.quantization.fp8 import BlockScales
from vllm.model_executor.model_loader.weight_target import StoredSlice, Weight, WeightTarget
from vllm.ops.weights import PackedWeight

MAX_UNPAIRED_BYTES = 4 << 30


@dataclass(frozen=True)
class Fp8WeightTarget(WeightTarget):
    """parameter[local] holds e4m3 values, `scales` [SR, SC] the scales of the blocks of the Hugging Face tensor that
    the slice touches: every layout holds the same values.
    """

    scales: Tensor | None = None

    def store(self, name: str, weight: Weight) -> None:
        """FP8 is taken as it comes, anything else is quantised: just the blocks that the slice touches."""
        assert self.parameter is not None and self.scales is not None, name
        (r0, r1), (c0, c1) = self.ranges()
        (br0, br1), (bc0, bc1) = touched(r0, r1), touched(c0, c1)
        if isinstance(weight, Fp8Weight):
            values, scales, _ = weight.cut(name, (r0, r1), (c0, c1))
        else:
            try:
                blocks = quantize(weight[br0 * BLOCK : br1 * BLOCK, bc0 * BLOCK : bc1 * BLOCK])
            except ValueError as error:
                raise ValueError(f"weight {name}: {error}") from error
            first_row, first_column = r0 - br0 * BLOCK, c0 - bc0 * BLOCK
            values = blocks.weight_OI[first_row : first_row + r1 - r0, first_column : first_column + c1 - c0]
            scales = blocks.scale_inv
        self.parameter.data[self.local].copy_(values)
        self.scales.copy_(scales)

    def held(self, name: str) -> Iterator[StoredSlice]:
        """The values and, under the checkpoint's name for them, the scales of all blocks that they touch."""
        yield from super().held(name)
        if self.scales is not None:
            (r0, _), (c0, _) = self.ranges()
            shape = tuple(map(num_blocks, self.hf_shape))
            yield StoredSlice(name + SCALE_SUFFIX, shape, torch.float32, self.scales, (r0 // BLOCK, c0 // BLOCK))

    def stored(self, name: str, dtype: torch.dtype) -> Iterator[StoredSlice]:
        """A scale counts where its block begins."""
        shape = tuple(map(num_blocks, self.hf_shape))
        if self.scales is None:
            yield StoredSlice(name, self.hf_shape, FP8_DTYPE, None)
            yield StoredSlice(name + SCALE_SUFFIX, shape, torch.float32, None)
            return
        values, _ = self.held(name)
        yield values
        (r0, r1), (c0, c1) = self.ranges()
        rows, columns = range(num_blocks(r0), num_blocks(r1)), range(num_blocks(c0), num_blocks(c1))
        first_row, first_column = rows.start - r0 // BLOCK, columns.start - c0 // BLOCK
        own = self.scales[first_row : first_row + len(rows), first_column : first_column + len(columns)]
        yield StoredSlice(name + SCALE_SUFFIX, shape, torch.float32, own, (rows.start, columns.start))


def hold_in_fp8(targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
    """Give the parameters of all quantised weights FP8 storage with scales; returns the targets of all weights."""
    result = {name: t if not is_quantized(name) else Fp8WeightTarget(t.hf_shape) for name, t in targets.items()}
    of_parameter: dict[int, list[str]] = {}
    for name, target in targets.items():
        if target.parameter is not None:
            of_parameter.setdefault(id(target.parameter), []).append(name)
    for names in of_parameter.values():
        if any(map(is_quantized, names)):
            assert all(map(is_quantized, names)), names
            result |= _convert({name: targets[name] for name in names})
    return result


class Fp8Pairs:
    """Joins the FP8 tensors of a stream with their scales, which may come before or after, also in a later call."""

    def __init__(self) -> None:
        self.unpaired: dict[str, Tensor] = {}  # copies: a stream may reuse its buffers

    def joined(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Weight]]:
        """ValueError when FP8 tensors of more than 4 GiB wait for their scales."""
        for name, tensor in weights:
            if tensor.dtype != FP8_DTYPE and not name.endswith(SCALE_SUFFIX):
                yield name, tensor
                continue
            weight_name = name.removesuffix(SCALE_SUFFIX)
            other = self.unpaired.pop(weight_name if name != weight_name else name + SCALE_SUFFIX, None)
            if other is not None:
                values, scales = (tensor, other) if name == weight_name else (other, tensor)
                yield weight_name, Fp8Weight(values, scales)
                continue
            self.unpaired[name] = tensor.clone()
            waiting = sum(t.nbytes for t in self.unpaired.values())
            if waiting > MAX_UNPAIRED_BYTES:
                raise ValueError(
                    f"{len(self.unpaired)} FP8 tensors of {waiting >> 20} MiB wait for their other half, e.g. "
                    f"{next(iter(self.unpaired))}; send each weight next to its {SCALE_SUFFIX}"
                )


def _convert(targets: dict[str, WeightTarget]) -> dict[str, WeightTarget]:
    """The targets of one parameter [..., R, C]: whole columns, rows one after the other, in each expert alike."""
    parameter = next(iter(targets.values())).parameter
    assert parameter is not None
    num_rows, num_columns = parameter.shape[-2:]
    # (first row here, end, first row and end there) of each weight, the same in every expert.
    segments = sorted({(*_rows(target), *target.ranges()[0]) for target in targets.values()})
    columns = {target.ranges()[1] for target in targets.values()}
    assert len(columns) == 1 and sum(stop - start for start, stop, *_ in segments) == num_rows, (segments, columns)
    (c0, c1) = columns.pop()
    assert c1 - c0 == num_columns, (c0, c1, num_columns)
    first_block, row_blocks = {}, []
    count = 0
    for start, stop, r0, r1 in segments:
        first_block[start] = count
        row_blocks.append(count + torch.arange(r0, r1) // BLOCK - r0 // BLOCK)
        assert stop - start == r1 - r0, segments
        count += len(range(*touched(r0, r1)))
    device, dtype = parameter.device, parameter.dtype
    is_aligned = c0 % BLOCK == 0 and num_columns % BLOCK == 0
    column_blocks = torch.arange(c0, c1, device=device) // BLOCK - c0 // BLOCK
    scale_inv = torch.ones(*parameter.shape[:-2], count, len(range(*touched(c0, c1))), device=device)
    scales = BlockScales(
        scale_inv, torch.cat(row_blocks).to(device), None if is_aligned else column_blocks, dtype=dtype
    )
    parameter.data = torch.empty_like(parameter.data, dtype=FP8_DTYPE)
    parameter.block_scales = scales  # type: ignore[attr-defined]
    converted: dict[str, WeightTarget] = {}
    for name, target in targets.items():
        start, _ = _rows(target)
        r0, r1 = target.ranges()[0]
        own = scale_inv[target.local[0]] if parameter.dim() == 3 else scale_inv
        own = own[first_block[start] : first_block[start] + len(range(*touched(r0, r1)))]
        converted[name] = Fp8WeightTarget(target.hf_shape, parameter, target.local, target.source, own)
    return converted


def weight_storage(model: nn.Module) -> list[Tensor]:
    """Every tensor that holds weights of the model, scales included."""
    parameters = list(model.parameters())
    scales = (getattr(parameter, "block_scales", None) for parameter in parameters)
    loose = (module.loose_tensors for module in model.modules() if isinstance(module, PackedWeight))
    return list(chain((p.data for p in parameters), (s.scale_inv for s in scales if s is not None), *loose))


def _rows(target: WeightTarget) -> tuple[int, int]:
    """[start, stop) of a target's rows within its parameter."""
    assert target.parameter is not None
    index = target.local[target.parameter.dim() - 2] if len(target.local) > target.parameter.dim() - 2 else slice(None)
    assert isinstance(index, slice), target.local
    start, stop, _ = index.indices(target.parameter.shape[-2])
    return start, stop
