"""Worker groups on a real local Ray: what calls bring back, and how fast a failure ends the group."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import ray
import torch

from hf_formats.cores import usable_cores
from tests.ray_workers import ray_with_forked_workers
from verl.protocol import DataProto
from verl.single_controller.base import Worker, WorkerDiedError, WorkerError, WorkerTimeoutError, get_together
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.mesh import Mesh
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.resources import Slot, actor_resources, rank_environment


def worker_class() -> type[Worker]:
    """Built in a function so that it is pickled by value: actors cannot import test modules."""

    class MeshWorker(Worker):
        def __init__(self, greeting: str, tp: int = 1) -> None:
            super().__init__()
            self.greeting = greeting
            self.tp = tp

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self) -> None:
            # Parts run against the rank order, so that a collection by rank would be noticed.
            dp_size = self.world_size // self.tp
            self._register_dispatch_collect_info("train", dp_size - 1 - self.rank // self.tp, self.rank % self.tp == 0)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def environment(self, names: list[str]) -> dict[str, str | None]:
            return {name: os.environ.get(name) for name in names}

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
        def double(self, data: DataProto, offset: int = 0) -> DataProto:
            data.batch["x"].mul_(2).add_(offset)  # in place: what arrives must be writable
            rows = np.array([f"{self.greeting}{self.rank}"] * len(data), dtype=object)
            return DataProto.from_dict({"y": data.batch["x"]}, {"by": rows}, {"metrics": {"rank": self.rank}})

        @register(dispatch_mode=Dispatch.ALL_TO_ALL)
        def add_rank(self, number: int) -> int:
            return number + self.rank

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
        def who(self) -> int:
            return self.rank

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail(self, rank: int) -> None:
            if self.rank == rank:
                raise KeyError("no such layer")
            time.sleep(300)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def all_reduce_forever(self) -> None:
            import torch.distributed as dist

            dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
            while True:
                dist.all_reduce(torch.ones(1))
                time.sleep(0.05)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def all_reduce_once(self) -> float:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
            total = torch.ones(1)
            dist.all_reduce(total)
            return float(total)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def new_listeners(self) -> list[tuple[str, int]]:
            """Where this rank listens once it is in the world and has a row store, and did not before."""
            import torch.distributed as dist

            from verl.utils.distributed import join_world
            from verl.workers.row_store import RowStore

            def listening() -> set[tuple[str, int]]:
                found = psutil.Process().net_connections("tcp")
                return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}

            before = listening()
            join_world("cpu", timeout_s=60)
            dist.all_reduce(torch.ones(1))
            self.row_store = RowStore(dist.group.WORLD, timeout_s=60)
            return sorted(listening() - before)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def sleep(self) -> None:
            time.sleep(300)

    return MeshWorker


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PASSED_ON", "yes")
        with ray_with_forked_workers(num_cpus=2):
            yield


def new_group(world_size: int, tp: int = 1) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[world_size])
    init = RayClassWithInitArgs(worker_class(), "hello", tp=tp)
    return RayWorkerGroup(pool, init, device_name="cpu", num_cpus_per_worker=0.25)


def assert_gone(pids: list[int], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process may end between open and read
        return False


def test_on_one_node_a_stranger_finds_nothing_that_listens_and_an_exception_ends_the_group(local_ray: None) -> None:
    """The exception names its rank and has its traceback."""
    with new_group(2) as group:
        listeners = group.new_listeners()
        assert group.master_address == "127.0.0.1" and [len(found) >= 2 for found in listeners] == [True, True]
        assert ("127.0.0.1", int(group.master_port)) in listeners[0]
        for host, port in [address for of_rank in listeners for address in of_rank]:
            assert host == "127.0.0.1"
            socket.create_connection((host, port), timeout=5).close()
            with pytest.raises(ConnectionRefusedError):  # an address that only listeners on all addresses answer
                socket.create_connection(("127.0.0.2", port), timeout=5)
        pids = group.pids()
        start = time.monotonic()
        with pytest.raises(WorkerError, match=rf"rank 1 \(pid {pids[1]} on .*KeyError: 'no such layer'") as caught:
            group.fail(1)
        assert time.monotonic() - start < 10 and "in fail" in str(caught.value)
        assert_gone(pids)


def test_two_groups_in_one_world_meet_work_beside_each_other_and_tell_who_died(local_ray: None) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    init = RayClassWithInitArgs(worker_class(), "hello")
    settings = {"device_name": "cpu", "num_cpus_per_worker": 0.25}
    pools = [RayResourcePool(process_on_nodes=[size]) for size in (2, 1)]
    with (
        RayWorkerGroup(pools[0], init, num_later_ranks=1, **settings) as first,
        RayWorkerGroup(pools[1], init, joins=first, **settings) as second,
    ):
        places = [list(found.values()) for group in (first, second) for found in group.environment(names)]
        assert places == [["0", "3", "0"], ["1", "3", "1"], ["2", "3", "2"]]
        assert get_together(first.start("all_reduce_once"), second.start("all_reduce_once")) == [[3.0, 3.0], [3.0]]
        beside = second.start("add_rank", 7)
        seen: list[bool] = []
        first.while_waiting = lambda: seen.append(beside.is_done())
        while True not in seen:
            assert first.who() == 0
        assert beside.get() == [9]
        first.while_waiting = None
        calls = first.start("all_reduce_once"), second.start("sleep")
        assert not any(call.is_done() for call in calls)
        pids, killed_at = [*first.pids(), *second.pids()], time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 2 \(pid \d+ on .*\) died during (sleep|all_reduce_once)"):
            get_together(*calls)
        assert time.monotonic() - killed_at < 10
    assert_gone(pids)


def test_calls_over_a_2x2_mesh(local_ray: None) -> None:
    with new_group(4, tp=2) as group:
        group.init_model()
        data = DataProto.from_dict({"x": torch.arange(6.0)}, {"uid": list("abcdef")})
        output = group.double(data, offset=1)
        assert output.batch["y"].tolist() == [1, 3, 5, 7, 9, 11]
        assert output.non_tensor_batch["by"].tolist() == ["hello2"] * 3 + ["hello0"] * 3
        assert output.meta_info["metrics"] == {"rank": [2, 0]} and data.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
        large = DataProto.from_dict({"x": torch.arange(60000.0)})  # too large to travel with the calls
        assert torch.equal(group.double(large).batch["y"], large.batch["x"] * 2)
        with pytest.raises(ValueError, match="mesh 'train'.*dp size 2.*5 rows does not split into 2"):
            group.double(data[:5])
        assert group.add_rank([10, 20, 30, 40]) == [10, 21, 32, 43]
        assert group.who() == 0
        check_environment(group)
        with pytest.raises(AttributeError, match="no method 'doubel'"):
            group.doubel(data)
        pids = group.pids()
    assert len(set(pids)) == 4
    assert_gone(pids)
    with pytest.raises(WorkerError, match="shut down"):
        group.who()


def check_environment(group: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "VLLM_PASSED_ON"]
    for rank, seen in enumerate(group.environment(names)):
        expected = [str(rank), "4", str(rank), group.master_address, group.master_port, "1", "yes"]
        assert seen == dict(zip(names, expected, strict=True))


@pytest.mark.slow  # two_groups has a kill amid a collective and a sleep
@pytest.mark.parametrize("method", ["all_reduce_forever", "sleep"])
def test_kill_9_is_noticed_within_seconds(local_ray: None, method: str) -> None:
    group = new_group(2)
    pids = group.pids()
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    timer = threading.Timer(4, kill)
    timer.start()
    with pytest.raises(WorkerDiedError, match=rf"rank 1 \(pid {pids[1]} on .*\) died during {method}"):
        getattr(group, method)()
    timer.join(timeout=10)
    assert time.monotonic() - killed_at[0] < 10
    assert_gone(pids)


def test_a_timeout_names_the_silent_ranks(local_ray: None) -> None:
    group = new_group(2)
    pids = group.pids()
    with pytest.raises(WorkerTimeoutError, match=r"no answer after 0.5 s from .*rank 0.*rank 1"):
        group.call("sleep", timeout_s=0.5)
    assert_gone(pids)


def test_a_time_limit_holds_for_calls_that_are_waited_for_together(local_ray: None) -> None:
    with new_group(1) as quick:
        slow = new_group(1)
        start_s = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"sleep: no answer after 0.5 s from .*rank 0"):
            get_together(quick.start("sleep", timeout_s=60), slow.start("sleep", timeout_s=0.5))
        assert time.monotonic() - start_s < 15


def test_a_worker_that_cannot_be_built_leaves_nothing_behind(local_ray: None) -> None:
    init = RayClassWithInitArgs(worker_class())  # greeting is missing
    with pytest.raises(WorkerError, match="__init__ failed on rank .*greeting"):
        RayWorkerGroup(RayResourcePool([1]), init, num_cpus_per_worker=0.25)
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU") != 2.0:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


def test_missing_resources_are_named(local_ray: None) -> None:
    with pytest.raises(ValueError, match=r"process_on_nodes=\[1\].*'NPU': 1"):
        RayResourcePool([1]).reserve("npu", num_cpus=1, timeout_s=0.5)
    with pytest.raises(ValueError, match="device_name='tpu'"):
        RayResourcePool([1]).reserve("tpu", num_cpus=1, timeout_s=0.5)
    with pytest.raises(ValueError, match=r"process_on_nodes=\[0\]"):
        RayResourcePool([0])


def test_devices_take_one_resource_and_stay_visible() -> None:
    assert actor_resources("npu", 2) == {"num_cpus": 2, "num_gpus": 0, "resources": {"NPU": 1}}
    assert actor_resources("cuda", 2) == {"num_cpus": 2, "num_gpus": 1, "resources": {}}
    slot = Slot(rank=9, local_rank=1, world_size=16, placement=None, bundle_index=0)  # type: ignore[arg-type]
    env = rank_environment(slot, "npu", 8, {"HCCL_IF_BASE_PORT": "1", "HOME": "/x"})
    assert env["HCCL_IF_BASE_PORT"] == "1" and "HOME" not in env
    assert env["RANK"] == "9" and env["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_ranks_share_the_cores_of_their_node(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself gives a process of one CPU one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    slot = Slot(rank=0, local_rank=0, world_size=1, placement=None, bundle_index=0)  # type: ignore[arg-type]
    threads = [rank_environment(slot, device, num_on_node, {})["OMP_NUM_THREADS"] for num_on_node in (1, 2, 16)]
    assert threads == [str(usable_cores()), "1", "1"]
    assert rank_environment(slot, device, 16, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_a_mesh_has_one_collecting_rank_per_part() -> None:
    assert not Mesh((0, 0, 1, 1), (True, False, False, True)).problems()
    assert Mesh((0, 0, 1, 1), (True, True, False, False)).problems() == [
        "dp rank 0 is collected from ranks [0, 1], expected exactly one",
        "dp rank 1 is collected from ranks [], expected exactly one",
    ]


def test_a_worker_reads_its_place_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Worker:
        return worker_class()("hi")  # type: ignore[call-arg]

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK=''"):
        build()
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    worker = build()
    assert (worker.rank, worker.world_size) == (1, 2)
    with pytest.raises(ValueError, match=r"no mesh 'train', only \[\]"):
        worker._query_mesh("train")
