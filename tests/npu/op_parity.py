"""Runs one entry of an op table on two devices: native on the simulator, reference on the CPU, forward and backward.

A case is a function of (`Maker`, sizes): it gives tensors for the device and how the entry is called with them. The
same case runs with values at tiny sizes, and without memory (fake tensors) at a real model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {FP32: 1e-6, BF16: 1e-2}


@dataclass
class Call:
    """``run(table, *tensors)`` calls the entry with tensors on the table's device; what it returns is compared."""

    run: Callable[..., Any]
    tensors: list[Tensor | None]


@dataclass(frozen=True)
class Entry:
    """How one entry of a table is tested."""

    cases: dict[str, Callable[[Maker, Any], Call]]
    npu_ops: frozenset[str] = frozenset()  # what a native entry must execute in its cases, forward and backward
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)
    tolerance: dict[torch.dtype, float] = field(default_factory=lambda: dict(TOLERANCE))
    # Which tensor the one output is like; for a reference that cannot run without values at real sizes.
    output_like: int | None = None


class Maker:
    """Makes a case's tensors on the host, random or, at sizes that no host holds, without memory."""

    def __init__(self, dtype: torch.dtype, is_fake: bool = False) -> None:
        self.dtype = dtype
        # An op may use small tensors of its own (a mask, the ends of sequences) beside the fake ones.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext()
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of the case's dtype."""
        with self.mode:
            if not isinstance(self.mode, nullcontext):
                return torch.empty(*shape, dtype=dtype or self.dtype)
            return torch.randn(*shape, generator=self._generator).to(dtype or self.dtype)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same, and its gradient is compared."""
        return self.floats(*shape, dtype=dtype).requires_grad_()

    def angles(self, *shape: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32."""
        turns = self.floats(*shape, dtype=FP32)
        return turns.cos(), turns.sin()

    def choices(self, tokens: int, choices: int, experts: int) -> Tensor:
        """[tokens, choices] int64, no expert twice in a row."""
        with self.mode:
            if not isinstance(self.mode, nullcontext):
                return torch.empty(tokens, choices, dtype=torch.int64)
            return torch.rand(tokens, experts, generator=self._generator).argsort(-1)[:, :choices].contiguous()


def outcome(table: Any, call: Call, device: str) -> dict[str, Tensor]:
    """Outputs and gradients by name, on the host, for one fixed gradient of each floating output."""
    tensors = [to_device(x, device) for x in call.tensors]
    outputs = call.run(table, *tensors)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    upstream = [(x, _gradient_of(x)) for x in outputs if x.requires_grad]
    if upstream:
        torch.autograd.backward([x for x, _ in upstream], [grad for _, grad in upstream])
    found = {f"output {i}": x.detach() for i, x in enumerate(outputs)}
    for i, x in enumerate(tensors):
        if x is not None and x.requires_grad:
            assert x.grad is not None, f"tensor {i} got no gradient"
            found[f"gradient {i}"] = x.grad
    return {name: x.to("cpu") for name, x in found.items()}


def to_device(x: Tensor | None, device: str) -> Tensor | None:
    """A leaf of its own on the device, never sharing memory with ``x``; strides are kept."""
    if x is None:
        return None
    if _is_fake(x):
        with x.fake_mode:
            moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    else:
        moved = x.detach().clone(memory_format=torch.preserve_format).to(device)
    return moved.requires_grad_(x.requires_grad)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: dict[torch.dtype, float]) -> None:
    """Equal names, shapes and dtypes; values within the tolerance of the largest one (integers: the same)."""
    assert_same_form(ours, theirs)
    for name, wanted in theirs.items():
        found = ours[name]
        if not wanted.is_floating_point():
            assert torch.equal(found, wanted), f"{name}: {found} is not {wanted}"
            continue
        assert found.isfinite().all() and wanted.isfinite().all(), f"{name}: not finite"
        if wanted.numel():
            gap = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-3)
            assert gap <= tolerance[wanted.dtype], f"{name}: off by {gap:.2e} of its largest value"


def assert_same_form(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    forms = [{name: (tuple(x.shape), x.dtype) for name, x in found.items()} for found in (ours, theirs)]
    assert forms[0] == forms[1]


def pairs(entries: dict[str, Entry]) -> Iterator[tuple[str, str]]:
    """(entry, case) of a table, for pytest's parametrize."""
    for entry, how in entries.items():
        for case in how.cases:
            yield entry, case


def _gradient_of(x: Tensor) -> Tensor:
    if _is_fake(x):
        return torch.empty_like(x)
    return torch.linspace(-1, 1, x.numel()).view(x.shape).to(x.dtype).to(x.device)


def _is_fake(x: Tensor) -> TypeGuard[FakeTensor]:
    return isinstance(x, FakeTensor)
