"""Decode steps of a CPU as graphs: the kernels' calls with their addresses, torch's ops and collectives between them.

A replay repeats the calls on the memory they were captured with: one call into the library for all kernels between two
torch ops, and no Python per layer. The few torch ops of a layer have kernels for replays too (`_kernel_of`). Memory
that is freed during capture is used again by later ops of the same step (`_Arena`) and by nothing else, so that all
layers work in the same few pages.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops.cpu.build import call_of, kernels
from vllm.ops.cpu.memory import leased
from vllm.platforms.interface import CapturedGraph, GraphPool

_CALL_BYTES = 8 * 20  # of one captured call, as in csrc/kernels.cpp
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Active(threading.local):
    capture: Capture | None = None


_ACTIVE = _Active()


def launch(name: str, *arguments: float) -> None:
    """Run the kernel ``name``; while this thread captures a graph, add the call to it."""
    call = call_of(name, *arguments)
    kernels().cpu_run(1, call)
    if _ACTIVE.capture is not None:
        _ACTIVE.capture.add_call(call)


def is_capturing() -> bool:
    """Whether this thread captures a graph, which then owns what the thread allocates."""
    return _ACTIVE.capture is not None


class CpuGraphPool(GraphPool):
    """Captures the calls of this package's kernels, of torch's ops and of collectives."""

    runs_captures = True

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """See ``GraphPool.capture``.

        Raises:
            RuntimeError: the work of an op or the shape of its result depends on values.
        """
        capture = Capture(self._blocks)
        _ACTIVE.capture = capture
        try:
            with capture:
                output = run()
        finally:
            _ACTIVE.capture = None
        capture.end()
        return CapturedGraph(output, capture.replay, capture.release)


class Capture(TorchDispatchMode):
    """The work of one step in order: torch's ops while the mode is active, and the kernels' calls through `launch`."""

    def __init__(self, blocks: list[np.ndarray]) -> None:
        """blocks: memory of the pool that no graph uses while a replay of this one runs."""
        super().__init__()
        self._work: list[Callable[[], object]] = []
        self._calls: list[bytes] = []  # since the last torch op
        self._arena = _Arena(blocks)
        self._results: list[object] = []  # of torch's ops: calls hold addresses in their memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Avoid an import of torch's compiler, 80 MB and a second, which a mode otherwise causes."""
        return False

    def add_call(self, call: bytes) -> None:
        """Add the call of a kernel (`call_of`)."""
        self._calls.append(call)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if _NEEDS_VALUES & set(func.tags):
            raise RuntimeError(f"{func} cannot be captured: its work depends on values; set enforce_eager=True")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self.end_calls()
            self._work.append(partial(_communicate, func, args, kwargs))
            return result
        if func in _ALLOCATIONS:
            return self._arena.empty_like(result)
        if not _is_view(func, args, result):
            if func in _HAVE_KERNELS and isinstance(result, Tensor) and not kwargs:
                out = result if func._schema.is_mutable else self._arena.empty_like(result).copy_(result)
                if call := _kernel_of(func, args, out):
                    self.add_call(call)
                    return out
            self.end_calls()
            self._results.append(result)
            self._work.append(_again(func, args, kwargs, result))
        return result

    def replay(self) -> None:
        for work in self._work:
            work()

    def release(self) -> None:
        self._work, self._results = [], []

    def end(self) -> None:
        self.end_calls()
        self._arena.close()

    def end_calls(self) -> None:
        """Turn the kernels' calls so far into one piece of work."""
        if self._calls:
            words = b"".join(call.ljust(_CALL_BYTES, b"\0") for call in self._calls)
            self._work.append(partial(kernels().cpu_run, len(self._calls), words))
            self._calls = []


class _Arena:
    """Memory of one graph. Replays keep the order of the capture, so what was free then is free again.

    Graphs of a pool take one another's blocks, largest captures first: only what a graph still refers to is its own.
    """

    def __init__(self, blocks: list[np.ndarray]) -> None:
        self._blocks = blocks
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by bytes; the last one is used first
        self._is_open = True

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return uninitialised memory with the shape and strides of ``tensor``."""
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == 0:
            return tensor
        free = self._free[num_bytes]
        block = free.pop() if free else self._take(num_bytes)
        memory = leased(block[:num_bytes], self._give_back, num_bytes, block)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def close(self) -> None:
        """End the capture: what is free is the pool's."""
        self._is_open = False
        for free in self._free.values():
            self._blocks += free
        self._free.clear()

    def _take(self, num_bytes: int) -> np.ndarray:
        """The smallest block of the pool that is large enough, or a new one."""
        fitting = [index for index, block in enumerate(self._blocks) if len(block) >= num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8).numpy()
        return self._blocks.pop(min(fitting, key=lambda index: len(self._blocks[index])))

    def _give_back(self, num_bytes: int, block: np.ndarray) -> None:
        (self._free[num_bytes] if self._is_open else self._blocks).append(block)


_HAVE_KERNELS = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.index_select.default,
}


def _kernel_of(func: Any, args: tuple[Any, ...], out: Tensor) -> bytes | None:
    """Return the call of the kernel that writes an op's result to `out`; None where there is none.

    The bits are torch's, except that kernels may flush denormal sums of bfloat16 to zero.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not all(tensor.is_contiguous() for tensor in (*tensors, out)):
        return None
    first, second = tensors[0], tensors[-1]
    if func in (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default):
        is_along_rows = func is torch.ops.aten.embedding.default or args[1] == 0
        if not is_along_rows or first.dim() != 2 or second.dim() != 1 or second.dtype != torch.int64:
            return None
        row_bytes = first.shape[1] * first.element_size()
        return call_of("cpu_take_rows", first.data_ptr(), row_bytes, second.data_ptr(), len(second), out.data_ptr())
    if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
        if len(tensors) != 2 or first.shape != second.shape or not first.dtype == second.dtype == out.dtype:
            return None
        if out.dtype not in (torch.float32, torch.bfloat16):
            return None
        mode = int(out.dtype == torch.bfloat16)
        return call_of("cpu_add", mode, first.data_ptr(), second.data_ptr(), out.numel(), out.data_ptr())
    if (first.dtype, out.dtype) == (torch.bfloat16, torch.float32):
        return call_of("cpu_widen", first.data_ptr(), out.numel(), out.data_ptr())
    return None


def _communicate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a collective, and wait for it as the captured step did: only those that block are captured."""
    result = func(*args, **kwargs)
    (result[-1] if isinstance(result, (tuple, list)) else result).wait()


def _is_view(func: Any, args: tuple[Any, ...], result: object) -> bool:
    """Whether the result is an argument or a view of one: ops such as `to` and `reshape` may also copy."""
    if not any(found.alias_info is not None and not found.alias_info.is_write for found in func._schema.returns):
        return False
    if not isinstance(result, Tensor):
        return True  # split, unbind
    address = result.untyped_storage().data_ptr()
    return any(isinstance(arg, Tensor) and arg.untyped_storage().data_ptr() == address for arg in args)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> Callable[[], object]:
    """Return the function that computes `result` again."""
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)
    if not isinstance(result, Tensor):
        raise RuntimeError(f"{func} cannot be captured: it has several results; set enforce_eager=True")
    return lambda: result.copy_(func(*args, **kwargs))
