"""Launches: what the host queues on a device, one after another, and the time that it takes for that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

LAUNCH_S = 10e-6  # of the host, for a kernel or a copy through torch_npu (vLLM-Ascend's profiles; cann 6.1.3)
_LIBRARY = torch.library.Library("plan", "DEF")
_LIBRARY.define("launch(int count) -> ()")
_LIBRARY.impl("launch", lambda count: None, "CompositeExplicitAutograd")
LAUNCH = torch.ops.plan.launch.default
_MEMORY_ONLY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
_QUESTIONS_AND_VIEWS = {"_local_scalar_dense", "is_pinned", "record_stream", "_unsafe_view", "detach", "alias"}


@dataclass(frozen=True)
class Launches:
    """The launches of one rank in a phase.

    unit: step (of a generation), micro-batch, or call: what a training call launches once, such as the optimizer's
    step · each: launches of one unit · times: units in a step of training · layers: that a unit passes.
    """

    phase: str
    unit: str
    each: int
    times: int
    layers: int

    @property
    def per_layer(self) -> float:
        """Launches of a unit over its layers; what belongs to none counts too."""
        return self.each / max(self.layers, 1)

    @property
    def host_s(self) -> float:
        """Seconds of the host in a step of training."""
        return self.each * self.times * LAUNCH_S


def launched(count: int = 1) -> None:
    """Count kernels of a device that a plan replaces by the shapes of their results."""
    LAUNCH(count)


@cache
def is_launch(func: Any) -> bool:
    """Whether torch's operator runs something on the device: it makes more than a view or memory without values."""
    if any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
        return False
    name = func._schema.name.removeprefix("aten::")
    return func.namespace not in ("prim", "profiler", "c10d") and name not in _MEMORY_ONLY | _QUESTIONS_AND_VIEWS
