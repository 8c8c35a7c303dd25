"""Decode steps as ACL graphs, and how the host arguments of an op in a captured graph are updated.

A capture takes streams of the device, of which it has some two thousand: more with every size, layer and communicator.
"""

from __future__ import annotations

from collections.abc import Callable

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


def capture_updatable(launch: Callable[[], None], before_replay: list[Callable[[], None]]) -> None:
    """Capture the tasks of `launch` and append to `before_replay` the function that replaces them by a new launch.

    `launch` must issue the same tasks on the same tensors every time; only host values may differ. CANN updates tasks
    in stream order, so those of a graph are up to date when it is replayed on the same stream afterwards
    (aclmdlRICaptureTaskUpdateBegin; driver 25.0.RC1 or newer).
    """
    import torch_npu

    stream = torch_npu.npu.current_stream()
    torch_npu.npu.graph_task_group_begin(stream)
    launch()
    handle = torch_npu.npu.graph_task_group_end(stream)

    def update() -> None:
        stream = torch_npu.npu.current_stream()
        torch_npu.npu.graph_task_update_begin(stream, handle)
        launch()
        torch_npu.npu.graph_task_update_end(stream)

    before_replay.append(update)
