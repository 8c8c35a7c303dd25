"""Graphs on the simulator: capture leaves no trace, replay repeats the work on the same memory, updates reach it."""

from __future__ import annotations

from collections.abc import Callable

import npusim
import pytest
import torch
import torch_npu


def captured(work: Callable[[], torch.Tensor], **how: object) -> tuple[torch.npu.NPUGraph, torch.Tensor]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **how):
        out = work()
    return graph, out


def replayed(graph: torch.npu.NPUGraph, out: torch.Tensor) -> torch.Tensor:
    graph.replay()
    torch.npu.synchronize()
    return out.cpu()


def test_replay_repeats_native_and_aten_ops_on_new_values() -> None:
    x, gamma = torch.arange(8.0, device="npu").view(2, 4), torch.rand(4, device="npu")
    total = torch.zeros(2, 4, device="npu")

    def work() -> torch.Tensor:
        total.add_(torch_npu.npu_rms_norm(x, gamma)[0] * 2)
        return torch.cat([total, x]).softmax(-1)[:, 1:].contiguous()

    graph, out = captured(work)
    assert total.tolist() == [[0.0] * 4] * 2 and bool(out.isnan().all())  # nothing has run yet
    npusim.reset_calls()
    expected = torch.zeros(2, 4)
    for step in range(3):
        x.copy_(torch.arange(8.0).view(2, 4) + step)
        expected += torch.nn.functional.rms_norm(x.cpu(), (4,), gamma.cpu(), 1e-6) * 2
        found = replayed(graph, out)
        torch.testing.assert_close(total.cpu(), expected)
        torch.testing.assert_close(found, torch.cat([expected, x.cpu()]).softmax(-1)[:, 1:])
    assert npusim.calls()["npu_rms_norm"] == 3
    graph.reset()


def test_random_numbers_move_on_with_each_replay() -> None:
    graph, out = captured(lambda: torch.rand(16, device="npu"))
    torch.npu.manual_seed(3)
    first, second = replayed(graph, out), replayed(graph, out)
    torch.npu.manual_seed(3)
    assert torch.equal(replayed(graph, out), first) and not torch.equal(first, second)


def test_graphs_share_a_pool() -> None:
    pool, x = torch.npu.graph_pool_handle(), torch.ones(4, 8, device="npu")
    graphs = {size: captured(lambda size=size: (x[:size] * size).sum(-1), pool=pool) for size in (4, 2, 1)}
    for size, (graph, out) in graphs.items():
        assert replayed(graph, out).tolist() == [8.0 * size] * size


def test_a_stream_that_waits_for_the_capturing_one_captures_too() -> None:
    """What it allocates belongs to the graph's pool: nothing else gets that memory."""
    x, side = torch.arange(4.0, device="npu"), torch.npu.Stream()

    def work() -> torch.Tensor:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            doubled = (x + 1) * 2
        total = x * 100
        main.wait_stream(side)
        return total + doubled

    graph, out = captured(work)
    with torch.npu.stream(side):
        others = [torch.zeros(4, device="npu") for _ in range(8)]
    assert replayed(graph, out).tolist() == [2.0, 104.0, 206.0, 308.0]
    assert all(other.tolist() == [0.0] * 4 for other in others)


def test_a_stream_may_not_stay_apart_at_the_end_of_a_capture() -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def work() -> torch.Tensor:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            return x + 1

    with pytest.raises(RuntimeError, match="a stream that joined it is apart"):
        captured(work)
    graph, out = captured(lambda: x + 2)
    assert replayed(graph, out).tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x: x.sum().item(), "the host needs its values"),
        (lambda x: x.nonzero(), "the host needs its values or its size"),
        (lambda x: x[x > 0], "with a mask"),
        (lambda x: torch.where(x > 0, x, 0.5), "with a number"),
        (lambda x: x.cpu(), "copies to new host memory"),
        (lambda x: x.copy_(torch.ones(4)), "host memory that is not pinned"),
        (lambda x: torch.npu.synchronize(), "synchronising the device"),
        (lambda x: torch.npu.current_stream().synchronize(), "synchronising the stream"),
    ],
)
def test_what_cannot_be_captured(work: Callable[[torch.Tensor], object], reason: str) -> None:
    x = torch.ones(4, device="npu")
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match=reason), torch.npu.graph(graph):
        work(x)
    assert (x + 1).tolist() == [2.0] * 4  # and the device goes on working


def test_a_graph_over_memory_that_is_gone_is_an_error() -> None:
    memory = [torch.ones(8 << 20, device="npu")]
    graph, out = captured(lambda: memory[0][:2] + 1)
    assert replayed(graph, out).tolist() == [2.0, 2.0]
    memory.clear()
    torch.npu.empty_cache()
    with pytest.raises(RuntimeError, match="a tensor that the graph was captured with is gone"):
        graph.replay()


class Grouped:
    """One op of a graph in a task group, behind an external event, as attention with lengths of the host."""

    def __init__(self) -> None:
        self.stream, self.update_stream = torch.npu.Stream(), torch.npu.Stream()
        self.x, self.out = torch.ones(3, device="npu"), torch.empty(3, device="npu")
        self.event, self.graph = torch.npu.ExternalEvent(), torch.npu.NPUGraph()
        with torch.npu.graph(self.graph, stream=self.stream):
            self.event.wait(self.stream)
            self.event.reset(self.stream)
            torch.npu.graph_task_group_begin(self.stream)
            torch.mul(self.x, 2.0, out=self.out)
            self.group = torch.npu.graph_task_group_end(self.stream)
            self.result = self.out + 1

    def update(self, factor: float) -> None:
        with torch.npu.stream(self.update_stream):
            torch.npu.graph_task_update_begin(self.update_stream, self.group)
            torch.mul(self.x, factor, out=self.out)
            torch.npu.graph_task_update_end(self.update_stream)
            self.event.record(self.update_stream)


def test_a_group_is_updated_before_or_after_the_replay_begins() -> None:
    grouped = Grouped()
    grouped.update(5.0)
    assert bool(grouped.out.isnan().all())  # an update computes nothing
    grouped.graph.replay()
    assert grouped.result.tolist() == [6.0] * 3
    grouped.graph.replay()  # stands still at the event until the update below
    grouped.update(7.0)
    assert grouped.result.tolist() == [8.0] * 3


def test_a_graph_that_nobody_updates_is_an_error_where_a_device_would_hang() -> None:
    grouped = Grouped()
    grouped.graph.replay()
    with pytest.raises(RuntimeError, match="waits for an external event that nobody has recorded"):
        torch.npu.synchronize()
    with pytest.raises(RuntimeError, match="waits for an external event that nobody has recorded"):
        grouped.result + 1
    grouped.update(3.0)
    assert grouped.result.tolist() == [4.0] * 3


def test_an_update_behind_the_replay_that_waits_for_it_is_an_error_where_a_device_would_hang() -> None:
    grouped = Grouped()
    grouped.graph.replay()
    update_stream, grouped.update_stream = grouped.update_stream, torch.npu.current_stream()
    with pytest.raises(RuntimeError, match="on the stream of a graph that stands still"):
        grouped.update(3.0)
    with pytest.raises(RuntimeError, match="on the stream of a graph that stands still"):
        grouped.event.record(torch.npu.current_stream())
    grouped.update_stream = update_stream
    grouped.update(3.0)
    assert grouped.result.tolist() == [4.0] * 3


def test_an_update_may_not_change_the_ops() -> None:
    grouped = Grouped()
    torch.npu.graph_task_update_begin(grouped.update_stream, grouped.group)
    torch.add(grouped.x, 1.0, out=grouped.out)
    with pytest.raises(RuntimeError, match="may only repeat the ops of its task group"):
        torch.npu.graph_task_update_end(grouped.update_stream)


def test_attention_lengths_through_torch_npus_own_update() -> None:
    """`graph.update` of torch_npu replaces the host-side lengths of attention, whatever order it is called in."""
    torch.manual_seed(0)
    query = torch.randn(2, 2, 1, 16).to("npu", torch.float16)
    keys = torch.randn(2, 2, 8, 16).to("npu", torch.float16)

    def attend(lengths: list[int]) -> torch.Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            query, keys, keys, num_heads=2, scale=0.25, input_layout="BNSD", actual_seq_lengths_kv=lengths
        )[0]

    graph, out = captured(lambda: attend([1, 1]), auto_dispatch_capture=True)
    for lengths in ([3, 8], [5, 2]):
        graph.replay()
        graph.update([{"actual_seq_lengths_kv": lengths}])
        torch.npu.synchronize()
        torch.testing.assert_close(out.cpu(), attend(lengths).cpu())
