"""`@reference("npu_rms_norm")`: gives an op of torch_npu its values on the simulator.

The op's real C++ host code runs first, with its argument checks and its output shapes; its kernels do nothing. Then the
reference computes on CPU tensors that share the device's memory, and its outputs are checked against what the host code
allocated before they are written there.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from npusim.build import library_dir

REFERENCES: dict[str, Callable[..., Any]] = {}
_registrations: list[torch.library.Library] = []


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the reference of `torch.ops.npu.<name>`.

    It is called with the op's arguments as given, device tensors exchanged for CPU tensors over the same memory, and
    returns the op's outputs: None for an output that it leaves as it is; in-place ops change their argument.

    Raises:
        ValueError: torch_npu has no such op, the op has no npu kernel, or there is a reference already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in REFERENCES:
            raise ValueError(f"two references for {name}: {REFERENCES[name].__module__} and {function.__module__}")
        packet = getattr(torch.ops.npu, name, None)
        if packet is None:
            raise ValueError(f"{function.__module__}: torch_npu has no op named {name}")
        library = torch.library.Library("npu", "IMPL")
        _registrations.append(library)
        implement(library, getattr(packet, "default", None) or getattr(packet, packet.overloads()[0]), name, function)
        REFERENCES[name] = function
        return function

    return register


def implement(
    library: torch.library.Library, op: torch._ops.OpOverload, name: str, function: Callable[..., Any]
) -> None:
    host_code = torch.library.get_kernel(op, "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        with host_only():
            outputs = host_code.call_boxed(keys, *args, **kwargs)
        values = function(*map(on_cpu, args), **{key: on_cpu(value) for key, value in kwargs.items()})
        fill(name, as_tuple(outputs), as_tuple(values))
        return outputs

    library.impl(op._name.removeprefix("npu::"), run, "PrivateUse1", allow_override=True)


def on_cpu(value: Any) -> Any:
    """Device tensors, alone or in lists, as CPU tensors over the same memory; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.ops.npusim.as_cpu(value)
    if isinstance(value, list | tuple):
        return [on_cpu(item) for item in value]
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
            torch.ops.npusim.as_cpu(output.detach()).copy_(value)


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
