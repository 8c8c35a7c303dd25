"""`@reference("npu_rms_norm")`: gives an op of torch_npu its values on the simulator.

The op's real C++ host code runs first, with its argument checks and its output shapes; its kernels do nothing. Then the
reference computes on CPU tensors that share the device's memory, and its outputs are checked against what the host code
allocated before they are written there. While a graph is captured, that second half becomes a task of the graph.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npusim import graph_tasks
from npusim.build import library_dir

REFERENCES: dict[str, Callable[..., Any]] = {}
_registrations: list[torch.library.Library] = []


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the reference of `torch.ops.npu.<name>`, all its overloads.

    It is called with the op's arguments as given, device tensors exchanged for CPU tensors over the same memory, and
    returns the op's outputs: None for an output that it leaves as it is; in-place ops change their argument. For the
    overload `out`, the arguments `out` and `workspace` are left away: the outputs are written into `out`.

    Raises:
        ValueError: torch_npu has no such op, or there is a reference already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in REFERENCES:
            raise ValueError(f"two references for {name}: {REFERENCES[name].__module__} and {function.__module__}")
        packet = getattr(torch.ops.npu, name, None)
        if packet is None:
            raise ValueError(f"{function.__module__}: torch_npu has no op named {name}")
        library = torch.library.Library("npu", "IMPL")
        _registrations.append(library)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "PrivateUse1"):
                implement(library, op, function)
        REFERENCES[name] = function
        return function

    return register


def implement(library: torch.library.Library, op: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    name = op.name().removeprefix("npu::")
    not_passed = ("out", "workspace") if op._overloadname == "out" else ()
    host_code = torch.library.get_kernel(op, "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.ops.npusim.check_order(name)
        task = graph_tasks.Task(name, op._schema, args, kwargs) if graph_tasks.is_capturing() else None
        with host_only():
            outputs = host_code.call_boxed(keys, *args, **kwargs)
        passed = {key: value for key, value in kwargs.items() if key not in not_passed}

        def compute(exchange: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
            inputs = exchanged(args, exchange), exchanged(passed, exchange)
            targets = exchanged(as_tuple(outputs), exchange)
            return lambda: fill(name, targets, as_tuple(function(*inputs[0], **inputs[1])))

        compute(torch.ops.npusim.as_cpu)()
        if task is not None:  # a graph does not keep the memory of its tensors alive
            task.record(compute(torch.ops.npusim.as_unowned_cpu), outputs)
        return outputs

    library.impl(name, run, "PrivateUse1", allow_override=True)


def exchanged(value: Any, exchange: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor exchanged; everything else as it is, containers copied."""
    if isinstance(value, torch.Tensor):
        return exchange(value.detach())
    if isinstance(value, dict):
        return {key: exchanged(item, exchange) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [exchanged(item, exchange) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def fill(name: str, outputs: tuple[Any, ...], values: tuple[Any, ...]) -> None:
    """Writes the reference's values into the op's outputs, which they must agree with in number, shape and dtype."""
    assert len(outputs) == len(values), f"{name}: {len(outputs)} outputs, but the reference gives {len(values)}"
    for index, (output, value) in enumerate(zip(outputs, values, strict=True)):
        if isinstance(output, list | tuple) and value is not None:
            fill(f"{name}[{index}]", tuple(output), tuple(value))
        elif isinstance(output, torch.Tensor) and value is not None:
            found, wanted = (tuple(value.shape), value.dtype), (tuple(output.shape), output.dtype)
            assert found == wanted, f"{name}: output {index} is {wanted} in torch_npu, but {found} in the reference"
            output.copy_(value)


@contextmanager
def host_only() -> Iterator[None]:
    """Inside, kernels that torch_npu asks for do nothing instead of failing."""
    library = _opapi()
    library.npusim_host_only(1)
    try:
        yield
    finally:
        library.npusim_host_only(0)


_opapi_library: ctypes.CDLL | None = None


def _opapi() -> ctypes.CDLL:
    global _opapi_library
    if _opapi_library is None:
        _opapi_library = ctypes.CDLL(str(library_dir() / "libopapi.so"))
    return _opapi_library
