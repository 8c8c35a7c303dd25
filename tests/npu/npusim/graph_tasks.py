"""Lets a Python reference be a task of a captured graph: the runtime keeps a number, this module what it stands for."""

import atexit
import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_UNDO = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FAILED = 507000
# Arguments that an op writes although its schema does not say so; it returns them, too.
_UNDECLARED_WRITES = {"npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache")}


class _CTask(ctypes.Structure):
    """`npusim_task` of cann/simulator.h."""

    _fields_ = (("run", _RUN), ("undo", _UNDO), ("drop", _UNDO), ("state", ctypes.c_void_p), ("name", ctypes.c_char_p))


_runtime: ctypes.CDLL | None = None
_tasks: dict[int, "Task"] = {}
_numbers = itertools.count(1)


def connect(runtime: ctypes.CDLL) -> None:
    """Names the loaded fake libascendcl.so; graphs that outlive the interpreter hear when it ends."""
    global _runtime
    _runtime = runtime
    runtime.npusim_record.argtypes = [_CTask]
    atexit.register(runtime.npusim_exiting)


def is_capturing() -> bool:
    return _runtime is not None and bool(_runtime.npusim_is_capturing())


class Task:
    """One call of a reference inside a capture. Made before the call, to remember what the call will overwrite."""

    def __init__(self, name: str, schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name.encode()
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written += [given[argument] for argument in _UNDECLARED_WRITES.get(name, ())]
        self.before = [(as_unowned(tensor), as_unowned(tensor).clone()) for tensor in tensors_in(written)]
        self.fresh_returns = [ret.alias_info is None for ret in schema.returns]
        self.fresh: list[torch.Tensor] = []
        self.compute: Callable[[], None] = lambda: None

    def record(self, compute: Callable[[], None], outputs: Any) -> None:
        """Gives the task to the graph: `compute` does the work again, new outputs are unwritten until then."""
        self.compute = compute
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        arguments = {tensor.data_ptr() for tensor, _ in self.before}
        for output, is_fresh in zip(outputs, self.fresh_returns, strict=True):
            if is_fresh:
                self.fresh += [as_unowned(t) for t in tensors_in(output) if t.data_ptr() not in arguments]
        number = next(_numbers)
        _tasks[number] = self
        assert _runtime is not None
        if _runtime.npusim_record(_CTask(_run, _undo, _drop, number, self.name)) != 0:
            raise RuntimeError(f"{self.name.decode()} could not be recorded in the graph")

    def undo(self) -> None:
        for tensor, value in self.before:
            tensor.copy_(value)
        for tensor in self.fresh:
            torch.ops.npusim.poison(tensor)


def as_unowned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops.npusim.as_unowned_cpu(tensor.detach())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@_RUN
def _run(number: int) -> int:
    task = _tasks[number]
    try:
        torch.ops.npusim.count_call(task.name.decode())
        task.compute()
    except Exception as error:  # it has to cross C; the runtime turns it into a RuntimeError
        assert _runtime is not None
        _runtime.npusim_set_error(f"{task.name.decode()} in a graph: {type(error).__name__}: {error}".encode())
        return _FAILED
    return 0


@_UNDO
def _undo(number: int) -> None:
    _tasks[number].undo()


@_UNDO
def _drop(number: int) -> None:
    del _tasks[number]
