"""Products of linear layers and of heads on a CPU, and the weights that they take.

Letters: T tokens, N heads, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.cpu.calls import KernelCalls
from vllm.ops.cpu.compressed import CompressedWeight, is_worth_compressing
from vllm.ops.cpu.panels import PanelWeight, is_worth_panels
from vllm.ops.weights import Weight, new_plain_weight
from vllm.utils import last_contiguous


class LinearOps:
    """See ``RolloutOps.linear``, ``embedding``, ``head_linear`` and ``new_weight``."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def new_weight(
        self,
        out_sizes: Sequence[int],
        in_size: int,
        num_experts: int | None = None,
        *,
        by_row: bool = False,
        may_pack: bool = True,
    ) -> Weight:
        """Weights for tiles are compressed, and those for pairs are panels, where it pays. Both of an expert's weights
        must be, or neither. Rows of compressed weights cannot be looked up.
        """
        dtype, count = torch.get_default_dtype(), 1 if num_experts is None else num_experts
        if may_pack and self._calls.takes_panels(dtype) and is_worth_panels(out_sizes, in_size, count):
            return PanelWeight(count, out_sizes, in_size)
        if by_row or not self._calls.takes_rows(dtype):
            return new_plain_weight(out_sizes, in_size, num_experts, by_row=by_row)
        size, both_ways = out_sizes[0], num_experts is not None
        are_equal = all(other == size for other in out_sizes)
        if may_pack and are_equal and is_worth_compressing(size, in_size, both_ways=both_ways):
            return CompressedWeight(count, len(out_sizes), size, in_size)
        return new_plain_weight(out_sizes, in_size, num_experts, by_row=True)

    def linear(self, x_TI: Tensor, weight_OI: Weight) -> Tensor:
        calls = self._calls
        x_TI = calls.converted(last_contiguous(x_TI), weight_OI.dtype)
        weight: tuple[Tensor | np.ndarray | int | None, ...]
        if isinstance(weight_OI, PanelWeight | CompressedWeight):
            is_panels = isinstance(weight_OI, PanelWeight)  # whose parts lie one below the other
            assert weight_OI.num_experts == 1
            assert calls.takes_panels(x_TI.dtype) if is_panels else calls.takes_rows(x_TI.dtype)
            parts, size_out, size_in = 1 if is_panels else weight_OI.num_parts, weight_OI.rows, weight_OI.columns
            mode, weight = calls.mode(x_TI), (None, 0, 0, 0, weight_OI.addresses())
        else:
            assert isinstance(weight_OI, Tensor)
            parts, (size_out, size_in), (n_stride, k_stride) = 1, weight_OI.shape, weight_OI.stride()
            mode, weight = calls.mode(x_TI, weight_OI), (weight_OI, 0, k_stride, n_stride, None)
        tokens = len(x_TI)
        out_TO = calls.empty(x_TI, tokens, parts * size_out)
        x = x_TI, x_TI.stride(0), 0
        calls.run("cpu_head_linear", mode, *x, tokens, parts, *weight, size_in, size_out, out_TO)
        return out_TO

    def embedding(self, ids_T: Tensor, weight_OI: Weight) -> Tensor:
        """See ``RolloutOps.embedding``."""
        if not isinstance(weight_OI, PanelWeight):
            assert isinstance(weight_OI, Tensor)
            return F.embedding(ids_T, weight_OI)
        out_TI = self._calls.empty(weight_OI.memory, len(ids_T), weight_OI.columns)
        panels = weight_OI.addresses(), weight_OI.columns
        self._calls.run("cpu_take_panel_rows", *panels, ids_T.contiguous(), len(ids_T), out_TI)
        return out_TI

    def head_linear(self, x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
        out_TNO = self._calls.empty(x_TNI, *x_TNI.shape[:2], weight_NIO.shape[2])
        self.write_head_linear(x_TNI, weight_NIO, out_TNO)
        return out_TNO

    def write_head_linear(self, x_TNI: Tensor, weight_NIO: Tensor, out_TNO: Tensor) -> None:
        """Write the result of `head_linear` to `out_TNO`."""
        tokens, heads, size_in = x_TNI.shape
        size_out = weight_NIO.shape[2]
        assert out_TNO.is_contiguous() and out_TNO.dtype is x_TNI.dtype, (out_TNO.stride(), out_TNO.dtype)
        x_TNI = last_contiguous(x_TNI)
        mode, x = self._calls.mode(x_TNI, weight_NIO), (x_TNI, *x_TNI.stride()[:2])
        weight = weight_NIO, *weight_NIO.stride(), None
        self._calls.run("cpu_head_linear", mode, *x, tokens, heads, *weight, size_in, size_out, out_TNO)
