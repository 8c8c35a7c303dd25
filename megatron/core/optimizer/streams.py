"""Streams of an update: copies to and from the device, and computation on each side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

_WITHOUT_STREAMS = ("cpu", "meta")  # devices on which a call returns when its work is done (or, on meta, planned)
TO_DEVICE, COMPUTE, TO_HOST, HOST = STREAMS = ("to_device", "compute", "to_host", "host")


class Streams(Protocol):
    """Work on one stream runs in the order of ``submit``; between streams only ``after`` orders it."""

    def submit(self, stream: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        """Queue ``work`` after the work of the handles ``after``, and return its own handle."""

    def finish(self) -> None:
        """Wait until all work is done, on the host."""


class InOrder:
    """Runs one work item at a time, in the order of ``submit``; on the CPU there is nothing to overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def submit(self, stream: str, work: Callable[[], None], after: Sequence[Any] = ()) -> None:
        """Run ``work`` now and wait for it."""
        work()
        if stream != HOST:
            self.finish()

    def finish(self) -> None:
        """Wait for the current stream, where the device has streams."""
        if self._device.type not in _WITHOUT_STREAMS:
            torch.get_device_module(self._device).current_stream(self._device).synchronize()


class DeviceStreams:
    """Three streams of one accelerator (cuda, npu): the current one computes, two others copy beside it.

    The host's stream is this thread: its work waits for the events that it needs and is done when ``submit`` returns,
    while the others continue with earlier work.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        compute = self._module.current_stream(device)
        self._streams = {name: self._module.Stream(device=device) for name in (TO_DEVICE, TO_HOST)} | {COMPUTE: compute}

    def submit(self, stream: str, work: Callable[[], None], after: Sequence[Any] = ()) -> Any:
        """Queue ``work``; returns the event that fires when it is done (None: it is done)."""
        events = [event for event in after if event is not None]
        if stream == HOST:
            for event in events:
                event.synchronize()
            work()
            return None
        queue = self._streams[stream]
        for event in events:
            queue.wait_event(event)
        with self._module.stream(queue):
            work()
            done = self._module.Event()
            done.record(queue)
        return done

    def finish(self) -> None:
        """Wait for all three streams."""
        for queue in self._streams.values():
            queue.synchronize()


def nothing() -> None:
    """A no-op that is submitted only to be waited for."""


def streams_of(device: torch.device, is_overlapped: bool = True) -> Streams:
    """Streams on an accelerator; plain order on the CPU or without overlap."""
    has_streams = device.type not in _WITHOUT_STREAMS
    return DeviceStreams(device) if is_overlapped and has_streams else InOrder(device)
