"""Decode steps as ACL graphs, and how the host arguments of an op in a captured graph are updated.

A capture takes streams of the device, of which it has some two thousand: more with every size, layer and communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm.platforms import CapturedGraph, GraphPool
from vllm_ascend.versions import DRIVER_WITH_STREAMS, cann_version, driver_version

# What CANN says when a capture finds no stream, as written in its error -> what that means.
STREAM_ERRORS = {
    "207008": "the device has no stream left",
    "alloc sq cq fail": "the driver has no queue left for another stream",
}


class AclGraphPool(GraphPool):
    """Graphs in one private pool of torch_npu's allocator."""

    def __init__(self) -> None:
        import torch_npu

        self._pool = torch_npu.npu.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        """See ``GraphPool.capture``; RuntimeError that says what to change when the device's streams run out."""
        import torch_npu

        graph = torch_npu.npu.NPUGraph()
        try:
            with torch_npu.npu.graph(graph, pool=self._pool):
                output = run()
        except RuntimeError as error:
            meaning = meaning_of_stream_error(str(error))
            if meaning is None:
                raise
            raise RuntimeError(
                f"a decode step could not be captured: {meaning}. Capture fewer sizes (cudagraph_capture_sizes), end "
                f"other processes on this device, or update the driver to {DRIVER_WITH_STREAMS} or newer; "
                f"found driver {driver_version()} and CANN {cann_version()}. Eager steps need no capture."
            ) from error
        return CapturedGraph(output, graph.replay, graph.reset)


def meaning_of_stream_error(text: str) -> str | None:
    """What CANN's message means when it is one that says that streams ran out, else None."""
    return next((meaning for sign, meaning in STREAM_ERRORS.items() if sign in text.lower()), None)


class TaskUpdates:
    """The tasks of one captured graph that hold host arguments, and their update beside each replay.

    The replay is launched first. It stands still before each task group until the group's event is recorded, which the
    update does on a stream of its own; an update costs more than a launch, so the layers before run meanwhile. CANN
    updates tasks in stream order (aclmdlRICaptureTaskUpdateBegin).
    """

    def __init__(self) -> None:
        """Begins inside the capture: it asks for the current stream, once for all groups."""
        import torch_npu

        self._captured_on, self._stream = torch_npu.npu.current_stream(), torch_npu.npu.Stream()
        self._groups: list[tuple[Callable[[], None], Any, Any]] = []
        self._replayed: Any = None  # the event behind the last replay

    def capture(self, launch: Callable[[], None]) -> None:
        """Capture the tasks of `launch`, which must issue the same ones on the same tensors whenever it is called."""
        import torch_npu

        event = torch_npu.npu.ExternalEvent()
        event.wait(self._captured_on)
        event.reset(self._captured_on)
        torch_npu.npu.graph_task_group_begin(self._captured_on)
        launch()
        self._groups.append((launch, torch_npu.npu.graph_task_group_end(self._captured_on), event))

    def renew(self) -> None:
        """Replace the host arguments of all tasks by those that `launch` has now, for the replay launched before."""
        import torch_npu

        replaying_on = torch_npu.npu.current_stream()
        if self._replayed is not None:  # the replay before may still run with the old arguments
            self._stream.wait_event(self._replayed)
        with torch_npu.npu.stream(self._stream):
            for launch, tasks, event in self._groups:
                torch_npu.npu.graph_task_update_begin(self._stream, tasks)
                launch()
                torch_npu.npu.graph_task_update_end(self._stream)
                event.record(self._stream)
        self._replayed = replaying_on.record_event()
