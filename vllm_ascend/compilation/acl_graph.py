"""Decode steps as ACL graphs, and how the host arguments of an op in a captured graph are updated."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm.platforms import CapturedGraph, GraphPool


class AclGraphPool(GraphPool):
    """Graphs in one private pool of torch_npu's allocator."""

    def __init__(self) -> None:
        import torch_npu

        self._pool = torch_npu.npu.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> CapturedGraph:
        import torch_npu

        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph, pool=self._pool):
            output = run()
        return CapturedGraph(output, graph.replay, graph.reset)


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
