"""Weights that are stored in FP8 blocks: their memory, and the pairing of incoming FP8 tensors with their scales."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, Fp8Weight, is_quantized, touched
from vllm.model_executor.model_loader.weight_view import Weight, WeightView
from vllm.ops.contract import RolloutOps
from vllm.ops.weights import BlockScales, PackedWeight, WeightCopies, block_scales_of

MAX_UNPAIRED_BYTES = 4 << 30


def hold_in_fp8(views: dict[str, WeightView]) -> dict[str, WeightView]:
    """Give the parameters of all quantised weights FP8 storage with scales; return the views of all weights."""
    result = {name: replace(view, dtype=FP8_DTYPE) if is_quantized(name) else view for name, view in views.items()}
    names_of_parameter: dict[int, list[str]] = {}
    for name, view in views.items():
        if view.parameter is not None:
            names_of_parameter.setdefault(id(view.parameter), []).append(name)
    for names in names_of_parameter.values():
        if any(map(is_quantized, names)):
            assert all(map(is_quantized, names)), names
            result |= _convert({name: views[name] for name in names})
    return result


def fp8_products_in_words(model: nn.Module, ops: RolloutOps) -> str:
    """Return a sentence for the log: how many weights held in FP8 are multiplied in it, and which are not, as latent
    attention's kv_b never is.
    """
    held = {name: p for name, p in model.named_parameters() if block_scales_of(p) is not None}
    others = [name for name, p in held.items() if name.endswith(".kv_b") or not ops.takes_fp8(p)]
    if len(others) == len(held):
        return "storage only, they are dequantised for every product"
    kinds = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in others}))
    return f"{len(held) - len(others)} of {len(held)} are multiplied in FP8, dequantised are {kinds or 'none'}"


class Fp8Pairs:
    """Pairs the FP8 tensors of a stream with their scales, which may come earlier, later, or in a later call."""

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


def _convert(views: dict[str, WeightView]) -> dict[str, WeightView]:
    """Convert the views of one parameter [..., R, C]: whole columns and consecutive rows, the same in each expert."""
    parameter = next(iter(views.values())).parameter
    assert isinstance(parameter, nn.Parameter), parameter
    num_rows, num_columns = parameter.shape[-2:]
    # (start, stop) of the rows of each weight in the parameter and in the HF tensor; the same in every expert.
    segments = sorted({(*_rows(view), *view.ranges[0]) for view in views.values()})
    columns = {view.ranges[1] for view in views.values()}
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
        scale_inv,
        torch.cat(row_blocks).to(device),
        None if is_aligned else column_blocks,
        dtype=dtype,
        has_whole_row_blocks=all(start % BLOCK == r0 % BLOCK == 0 for start, _, r0, _ in segments),
    )
    parameter.data = torch.empty_like(parameter.data, dtype=FP8_DTYPE)
    parameter.block_scales = scales  # type: ignore[attr-defined]
    converted: dict[str, WeightView] = {}
    for name, view in views.items():
        start, _ = _rows(view)
        r0, r1 = view.ranges[0]
        own = scale_inv[view.local[0]] if parameter.dim() == 3 else scale_inv
        own = own[first_block[start] : first_block[start] + len(range(*touched(r0, r1)))]
        converted[name] = replace(view, dtype=FP8_DTYPE, scales=own)
    return converted


def weight_storage(model: nn.Module) -> list[Tensor]:
    """Every tensor that holds weights of the model, scales and copies included."""
    parameters = list(model.parameters())
    scales = (getattr(parameter, "block_scales", None) for parameter in parameters)
    loose = (module.loose_tensors for module in model.modules() if isinstance(module, PackedWeight))
    copies = (module.tensors for module in model.modules() if isinstance(module, WeightCopies))
    return list(chain((p.data for p in parameters), (s.scale_inv for s in scales if s is not None), *loose, *copies))


def _rows(view: WeightView) -> tuple[int, int]:
    """[start, stop) of a view's rows within its parameter."""
    assert isinstance(view.parameter, Tensor), view.parameter
    index = view.local[view.parameter.dim() - 2] if len(view.local) > view.parameter.dim() - 2 else slice(None)
    assert isinstance(index, slice), view.local
    start, stop, _ = index.indices(view.parameter.shape[-2])
    return start, stop
