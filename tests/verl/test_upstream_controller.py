"""Upstream's single controller in a user's hands: names and signatures, dispatch by hand, workers on a real Ray."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.ray_workers import ray_with_forked_workers
from tests.verl.upstream_api import differences, module_differences, upstream_api
from verl import DataProto
from verl.single_controller import Worker
from verl.single_controller.base import ResourcePool
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    collect_nd_compute,
    dispatch_dp_compute,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    dummy_direct_rollout_call,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from verl.single_controller.ray.base import create_colocated_worker_raw_cls, merge_resource_pool


def test_signatures_are_upstreams() -> None:
    base = "verl.single_controller.base"
    assert not module_differences(
        f"{base}.decorator",
        *("MAGIC_ATTR", "Dispatch", "Execute", "init_predefined_dispatch_mode", "init_predefined_execute_mode"),
        *(
            "dummy_direct_rollout_call",
            "dispatch_one_to_all",
            "dispatch_all_to_all",
            "collect_all_to_all",
            "dispatch_dp_compute",
        ),
        *("collect_dp_compute", "dispatch_dp_compute_data_proto", "dispatch_dp_compute_data_proto_with_func"),
        *("collect_dp_compute_data_proto", "dispatch_nd_compute", "collect_nd_compute"),
        *("dispatch_nd_compute_dataproto", "collect_nd_compute_dataproto", "dispatch_lazy_compute_data_proto"),
        *("collect_lazy_compute_data_proto", "make_nd_compute_dataproto_dispatch_fn"),
        *("get_predefined_dispatch_fn", "register_dispatch_mode", "update_dispatch_mode"),
        *("get_predefined_execute_fn", "register"),
    )
    assert not module_differences(f"{base}.worker_group", "ResourcePool", "ClassWithInitArgs")
    assert not module_differences(f"{base}.worker", "WorkerHelper", "DistRankInfo", "DistGlobalInfo")
    worker = upstream_api()[f"{base}.worker"].classes["Worker"].methods
    missing = {"create_transferqueue_client"}  # transfer queues are not here
    for name in set(worker) - missing:
        member = getattr(Worker, name)
        assert isinstance(member, property) or differences(member, worker[name]) == []
    controller = "verl.single_controller.ray.base"
    group = upstream_api()[controller].classes["RayWorkerGroup"].methods
    names = ("__init__", "from_detached", "spawn", "spawn_fused", "fuse", "execute_all_sync", "execute_rank_zero_async")
    for name in names:
        assert differences(getattr(RayWorkerGroup, name), group[name]) == []
    pool = upstream_api()[controller].classes["RayResourcePool"].methods
    assert differences(RayResourcePool.__init__, pool["__init__"]) == []
    assert not module_differences(
        controller,
        *("create_colocated_worker_cls", "create_colocated_worker_raw_cls", "create_colocated_worker_cls_fused"),
        *("FusedWorkerCLSName", "get_random_string", "merge_resource_pool"),
    )


class Ranks:
    """All that the dispatch functions ask of a group."""

    world_size = 4


def test_parts_reach_the_ranks_of_a_mesh() -> None:
    group = Ranks()
    assert dispatch_one_to_all(group, 7, key="k") == (([7] * 4,), {"key": ["k"] * 4})
    assert dispatch_nd_compute([1, 1, 0, 0], 2, group, ["a", "b"]) == ((["b", "b", "a", "a"],), {})
    assert collect_nd_compute([True, False, False, True], group, [1, 2, 3, 4]) == [1, 4]
    (parts,), _ = dispatch_nd_compute_dataproto([0, 0, 1, 1], 2, group, DataProto.from_dict({"x": torch.arange(4)}))
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_mode_of_the_user_is_registered_once() -> None:
    register_dispatch_mode("reversed", lambda group, values: ((values[::-1],), {}), lambda group, output: sum(output))
    try:
        mode: Any = Dispatch["REVERSED"]
        fns = get_predefined_dispatch_fn(mode)
        assert fns["dispatch_fn"](Ranks(), [1, 2, 3, 4]) == (([4, 3, 2, 1],), {})
        assert fns["collect_fn"](Ranks(), [1, 2, 3, 4]) == 10 and DISPATCH_MODE_FN_REGISTRY[mode] is fns
        with pytest.raises(ValueError, match="already exists"):
            register_dispatch_mode("reversed", **fns)
        update_dispatch_mode(mode, fns["collect_fn"], fns["collect_fn"])
        assert get_predefined_dispatch_fn(mode)["dispatch_fn"] is fns["collect_fn"]
    finally:
        del DISPATCH_MODE_FN_REGISTRY[Dispatch.remove("reversed")]


def test_a_pool_numbers_its_processes() -> None:
    pool = ResourcePool([2, 1])
    assert (pool.world_size, pool.local_world_size_list(), pool.local_rank_list()) == (3, [2, 2, 1], [0, 1, 0])
    merged = merge_resource_pool(RayResourcePool([2], name_prefix="a"), RayResourcePool([1], name_prefix="b"))
    assert merged.store == [2, 1] and merged.name_prefix == "a_b"
    with pytest.raises(AssertionError, match="use_gpu"):
        merge_resource_pool(RayResourcePool([2]), RayResourcePool([1], use_gpu=False))


def test_what_is_no_mode_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected one of"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"needs \['collect_fn'\]"):
        register(dispatch_mode={"dispatch_fn": dispatch_one_to_all})
    with pytest.raises(AssertionError, match="must be a list of 4 entries"):
        dispatch_dp_compute(Ranks(), [1, 2])
    with pytest.raises(NotImplementedError, match="not called through its group"):
        dummy_direct_rollout_call(Ranks())


def worker_classes() -> tuple[type[Worker], type[Worker]]:
    """Built in a function so that they are pickled by value: actors cannot import test modules."""

    class Adder(Worker):
        def __init__(self, offset: int) -> None:
            super().__init__()
            self.offset = offset

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, data: DataProto) -> DataProto:
            data.batch["x"] += self.offset + 100 * self.rank
            return data

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def add_later(self, data: DataProto) -> DataProto:
            data.batch["x"] += self.offset
            return data

        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def first(self, number: int) -> int:
            return number + self.rank

        @register(
            dispatch_mode={
                "dispatch_fn": lambda group, values: ((values[::-1],), {}),
                "collect_fn": lambda group, output: sum(output),
            }
        )
        def weigh(self, value: int) -> int:
            return value * (self.rank + 1)

        @register()
        def with_rank(self, number: float) -> float:
            return number + self.rank

        @register()
        async def doubled(self, number: int) -> int:
            return 2 * number

        @register(blocking=False)
        def later(self, number: int) -> int:
            if number < 0:
                raise ZeroDivisionError("below 0")
            return number

        @register(execute_mode=Execute.RANK_ZERO)
        def length(self, numbers: list[int]) -> int:
            return len(numbers)

        def plain(self, value: int) -> int:
            return value + self.offset

        def variables(self, names: list[str]) -> list[str]:
            return [os.environ[name] for name in names]

    class Reader(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.ALL)
        def offset_beside(self) -> int:
            return int(self.get_fused_worker_by_name("adder").offset)  # type: ignore[union-attr]

    return Adder, Reader


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_with_forked_workers(num_cpus=2):
        yield


def numbers(size: int, auto_padding: bool = False) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(size)}, auto_padding=auto_padding)


def test_a_users_workers_alone_and_several_in_a_process(local_ray: None) -> None:
    adder, reader = worker_classes()
    pool = RayResourcePool([2], use_gpu=False)
    remote_class = ray.remote(adder)  # upstream's users decorate the class or wrap it
    with RayWorkerGroup(pool, RayClassWithInitArgs(remote_class, offset=10), num_cpus_per_worker=0.25) as group:
        assert group.add(numbers(4)).batch["x"].tolist() == [10, 11, 112, 113]
        padded = group.add(numbers(3, auto_padding=True))
        assert padded.batch["x"].tolist() == [10, 11, 112]  # the fourth row was padding
        later = group.add_later(numbers(2))
        assert group.add_later(later).get().batch["x"].tolist() == [20, 21]
        assert group.first(5) == 5 and group.weigh([1, 2]) == 2 * 1 + 1 * 2
        assert group.execute_all_sync("plain", 1) == [11, 11] and group.execute_all_sync("plain", [1, 2]) == [11, 12]
        assert ray.get(group.execute_rank_zero_async("plain", 4)) == 14
        assert group.with_rank(0.5) == [0.5, 1.5] and group.with_rank([1, 2]) == [1, 3]  # one for all, or one each
        assert group.doubled(3) == [6, 6] and group.length([7, 7]) == 2
        answers = group.later([1, 2])
        assert ray.get(answers) == [1, 2] and ray.get(group.later(answers)) == [1, 2]
        with pytest.raises(ZeroDivisionError, match="below 0"):
            ray.get(group.later(-1))
        padded_later = group.add_later(numbers(3, auto_padding=True))
        assert padded_later.get().batch["x"].tolist() == [10, 11, 12]
        names = ["RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        assert group.execute_all_sync("variables", names) == [["0", "2", "2"], ["1", "2", "2"]]
        others = RayWorkerGroup.from_detached(
            worker_names=group.worker_names, ray_cls_with_init=RayClassWithInitArgs(adder)
        )
        assert others.world_size == 2 and others.first(5) == 5
        others.shutdown()
        assert group.first(6) == 6  # they were not the other's to end

        def scaled(worker: Any, data: DataProto) -> DataProto:
            data.batch["x"] *= worker.offset
            return data

        assert group.execute_with_func_generator(scaled, numbers(2)).batch["x"].tolist() == [0, 10]

    init = {"adder": RayClassWithInitArgs(adder, offset=20), "reader": RayClassWithInitArgs(reader)}
    with RayWorkerGroup(pool, create_colocated_worker_cls(init), num_cpus_per_worker=0.25) as both:
        groups = both.spawn({"adder", "reader"})
        assert groups["adder"].add(numbers(4)).batch["x"].tolist() == [20, 21, 122, 123]
        assert groups["reader"].offset_beside() == [20, 20] and groups["adder"].execute_all_sync("plain", 1) == [21, 21]
        with pytest.raises(ValueError, match=r"no workers \['critic'\], only \['adder', 'reader'\]"):
            both.spawn({"critic"})
        both.fuse({"adder"})
        assert both.adder.first(3) == 3
    assert create_colocated_worker_cls_fused(init).cls.class_dict.keys() == init.keys()


def test_a_users_class_over_colocated_workers_and_detached_ones(local_ray: None) -> None:
    adder, reader = worker_classes()
    init = {"adder": RayClassWithInitArgs(adder, offset=20), "reader": RayClassWithInitArgs(reader)}

    class Both(create_colocated_worker_raw_cls(init)):  # type: ignore[misc]
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def sum(self, number: int) -> int:
            return self.adder.plain(number) + self.reader.offset_beside()

    pool = RayResourcePool([1], use_gpu=False, detached=True)
    settings = {"detached": True, "name_prefix": "kept", "num_cpus_per_worker": 0.25}
    with RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Both)), **settings) as both:
        both.fuse(init)
        assert both.sum(1) == [41] and both.adder.first(3) == 3 and both.worker_names == ["keptBoth_0:0"]


def test_a_dead_worker_aborts_the_process_that_watches(local_ray: None) -> None:
    caught: list[int] = []
    before = signal.signal(signal.SIGABRT, lambda number, frame: caught.append(number))
    try:
        with RayWorkerGroup(
            RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(worker_classes()[1]), num_cpus_per_worker=0.25
        ) as group:
            group.start_worker_aliveness_check(every_n_seconds=0.1)
            time.sleep(0.5)
            assert not caught
            ray.kill(group.workers[0])
            deadline = time.monotonic() + 20
            while not caught and time.monotonic() < deadline:
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGABRT, before)
    assert caught == [signal.SIGABRT]


def test_the_workers_of_the_page_run(local_ray: None) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(# judge\.py\n.*?)```", page, flags=re.DOTALL)
    script: dict[str, Any] = {"__name__": "__main__"}  # a script's classes are pickled by value
    exec(code, script)
    batch = DataProto.from_dict({"lengths": torch.tensor([3, 5, 7])}, auto_padding=True)
    assert script["main"](batch).batch["score"].tolist() == [3.0, 5.0, 7.0]
