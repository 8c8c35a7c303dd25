"""Collectives between processes through the real ProcessGroupHCCL: values, splits, groups, and ranks that stay away."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from npusim.build import library_dir

from tests.parallel.launcher import run_ranks

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8)


def npu(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("npu")


def reductions() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for dtype in DTYPES:
        x = npu([rank + 1, 2, 3], dtype)
        dist.all_reduce(x)
        found[str(dtype)] = x.tolist()
        if dtype != torch.uint8:  # torch_npu refuses to reduce-scatter it
            scattered = torch.empty(2, dtype=dtype, device="npu")
            dist.reduce_scatter_tensor(scattered, npu(range(2 * RANKS), dtype) + rank)
            found[f"{dtype} scattered"] = scattered.tolist()
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
        x = npu([rank + 1.0])
        dist.all_reduce(x, op=op)
        found[str(op)] = x.item()
    to_one = npu([1.0])
    dist.reduce(to_one, dst=1)
    found["reduce"] = to_one.item()
    with pytest.raises(RuntimeError, match="use 32 bits"):
        dist.all_reduce(npu([1], torch.int64))
    large = torch.full((300_001,), float(rank), device="npu")  # more than one round of shared memory
    dist.all_reduce(large)
    found["large"] = set(large.tolist())
    return found


def gathers() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    mine = npu([rank, 10 * rank])
    parts = [torch.empty(2, device="npu") for _ in range(RANKS)]
    dist.all_gather(parts, mine)
    found["all_gather"] = [part.tolist() for part in parts]
    whole = torch.empty(2 * RANKS, device="npu")
    dist.all_gather_into_tensor(whole, mine)
    found["all_gather_into_tensor"] = whole.tolist()
    uneven = [torch.empty(size, device="npu") for size in (1, 2, 3)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device="npu"))
    found["uneven"] = [part.tolist() for part in uneven]
    sent = mine.clone()
    dist.broadcast(sent, src=2)
    found["broadcast"] = sent.tolist()
    received = torch.empty(1, device="npu")
    dist.scatter(received, [npu([float(to)]) for to in range(RANKS)] if rank == 1 else None, src=1)
    found["scatter"] = received.item()
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects
    told = [f"from {rank}"]
    dist.broadcast_object_list(told, src=1)
    found["told"] = told
    return found


def exchanges() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    even = torch.empty(RANKS, device="npu")
    dist.all_to_all_single(even, npu([10 * rank + to for to in range(RANKS)]))
    found["even"] = even.tolist()
    sizes = [[0, 2, 1], [3, 0, 0], [0, 0, 0]]  # rows from rank to rank; rank 2 sends nothing
    out_sizes = [row[rank] for row in sizes]
    received = torch.empty(sum(out_sizes), device="npu")
    sent = torch.arange(float(sum(sizes[rank])), device="npu") + 10 * rank
    dist.all_to_all_single(received, sent, out_sizes, sizes[rank])
    found["uneven"] = received.tolist()
    lists = [torch.empty(size, device="npu") for size in out_sizes]
    dist.all_to_all(lists, list(sent.split(sizes[rank])))
    found["lists"] = [part.tolist() for part in lists]
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    from_left = torch.empty(50_000, device="npu")
    swaps = [
        dist.P2POp(dist.isend, torch.full((50_000,), float(rank), device="npu"), right),
        dist.P2POp(dist.irecv, from_left, left),
    ]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    found["ring"] = set(from_left.tolist())
    if rank == 0:
        dist.send(npu([5, 6], torch.int64), dst=2)
    elif rank == 2:
        got = torch.empty(2, dtype=torch.int64, device="npu")
        dist.recv(got, src=0)
        found["recv"] = got.tolist()
    return found


def groups() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    dist.barrier()
    group = single if rank == 1 else pair
    x = npu([float(rank + 1)])
    dist.all_reduce(x, group=group)
    found["group"] = x.item()
    works = [dist.all_reduce(npu([1.0]), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    found["async"] = all(work.is_completed() for work in works)
    dist.barrier(group=group)
    return found


def every_collective() -> dict[str, dict[str, Any]]:
    return {part.__name__: part() for part in (reductions, gathers, exchanges, groups)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NPU_COUNT", str(RANKS))
        return run_ranks(every_collective, RANKS, device="npu")


def test_reductions(results: list[dict[str, dict[str, Any]]]) -> None:
    for rank, found in enumerate(result["reductions"] for result in results):
        for dtype in DTYPES:
            assert found[str(dtype)] == [6, 6, 9], dtype
            wanted = [3 * 2 * rank + 3, 3 * (2 * rank + 1) + 3]
            assert found.get(f"{dtype} scattered", wanted) == wanted, dtype
        assert [found[str(op)] for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)] == [3, 1, 6]
        assert found[str(dist.ReduceOp.AVG)] == 2 and found["large"] == {3.0}
    assert results[1]["reductions"]["reduce"] == 3


def test_gathers(results: list[dict[str, dict[str, Any]]]) -> None:
    for rank, found in enumerate(result["gathers"] for result in results):
        assert found["all_gather"] == [[0, 0], [1, 10], [2, 20]]
        assert found["all_gather_into_tensor"] == [0, 0, 1, 10, 2, 20]
        assert found["uneven"] == [[0], [1, 1], [2, 2, 2]]
        assert found["broadcast"] == [2, 20] and found["scatter"] == rank
        assert found["objects"] == [{"rank": r} for r in range(RANKS)] and found["told"] == ["from 1"]


def test_exchanges(results: list[dict[str, dict[str, Any]]]) -> None:
    found = [result["exchanges"] for result in results]
    assert [each["even"] for each in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [each["uneven"] for each in found] == [[10, 11, 12], [0, 1], [2]]
    assert [each["lists"] for each in found] == [[[], [10, 11, 12], []], [[0, 1], [], []], [[2], [], []]]
    assert [each["ring"] for each in found] == [{2.0}, {0.0}, {1.0}]
    assert found[2]["recv"] == [5, 6]


def test_groups(results: list[dict[str, dict[str, Any]]]) -> None:
    assert [result["groups"]["group"] for result in results] == [4.0, 2.0, 4.0]
    assert all(result["groups"]["async"] for result in results)


def waits_for_nobody(folder: str) -> None:
    """Rank 1 leaves out a collective; what rank 0 is told, and how soon. Then both use a group that is still whole."""
    os.environ["HCCL_EXEC_TIMEOUT"] = "2"  # read when a communicator is made
    rank, other = dist.get_rank(), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1, device="npu"))
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="the other ranks did not come within 2 s"):
            dist.all_reduce(torch.ones(1, device="npu"))
        assert time.monotonic() - started < 20
        Path(folder, "told").touch()
    else:
        while not Path(folder, "told").exists():  # waits for rank 0's error, which its time-out brings
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match="has failed before"):
            dist.all_reduce(torch.ones(1, device="npu"))
    left = npu([1.0])
    dist.all_reduce(left, group=other)
    assert left.item() == 2
    Path(folder, f"done-{rank}").touch()
    os._exit(0)  # the launcher's last barrier would use the broken communicator


def test_a_rank_that_does_not_come_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # the ranks end by themselves, without results
        run_ranks(waits_for_nobody, 2, str(tmp_path), device="npu")
    assert (tmp_path / "done-0").exists() and (tmp_path / "done-1").exists()


def dies_in_a_collective() -> None:
    os.environ["HCCL_CONNECT_TIMEOUT"] = "2"
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1, device="npu"))


def test_the_next_run_clears_what_killed_ranks_left() -> None:
    """Shared memory has a name only until all ranks have opened it, so only ranks killed before that leave some."""
    with pytest.raises(RuntimeError, match=r"ranks failed with exit codes"):
        run_ranks(dies_in_a_collective, 2, device="npu")
    ctypes.CDLL(str(library_dir() / "libhccl.so")).HcclGetRootInfo(ctypes.create_string_buffer(1 << 14))
    pids = [
        name.removeprefix("npusim_hccl_").split("_")[0] for name in os.listdir("/dev/shm") if "npusim_hccl_" in name
    ]
    assert all(Path("/proc", pid).exists() for pid in pids)
