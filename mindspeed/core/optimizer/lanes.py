"""Where the pieces of a streamed computation run: one lane to the device, one for computing, one back to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

TO_DEVICE, COMPUTE, TO_HOST = LANES = ("to_device", "compute", "to_host")


class Lanes(Protocol):
    """Work on one lane runs in the order of ``submit``; between lanes only ``after`` orders it."""

    def submit(self, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        """Queue ``work`` behind what ``after`` names (results of earlier calls) and return what names it."""

    def finish(self) -> None:
        """Wait until all work is done, on the host."""


class InOrder:
    """Everything at once, in the order in which it comes: a device that is the host has nothing to overlap."""

    def submit(self, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> None:
        """Run ``work`` now."""
        work()

    def finish(self) -> None:
        """Nothing is left to wait for."""


class DeviceStreams:
    """Three streams of one accelerator (cuda, npu): the current one computes, two others copy beside it."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        compute = self._module.current_stream(device)
        self._streams = {lane: self._module.Stream(device=device) for lane in (TO_DEVICE, TO_HOST)} | {COMPUTE: compute}

    def submit(self, lane: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        """Queue ``work`` on the lane's stream; returns the event that fires when it is done."""
        stream = self._streams[lane]
        for event in after:
            stream.wait_event(event)
        with self._module.stream(stream):
            work()
            event = self._module.Event()
            event.record(stream)
        return event

    def finish(self) -> None:
        """Wait for all three streams."""
        for stream in self._streams.values():
            stream.synchronize()


def lanes_of(device: torch.device) -> Lanes:
    """Streams on an accelerator, plain order on the CPU."""
    return InOrder() if device.type == "cpu" else DeviceStreams(device)
