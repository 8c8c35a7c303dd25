"""The single controller in a user's hands, under upstream's names: workers on a real Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.ray_workers import ray_with_forked_workers
from verl import DataProto
from verl.single_controller import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


def test_what_is_no_mode_is_refused() -> None:
    with pytest.raises(AssertionError, match="expected one of"):
        register(dispatch_mode="ONE_TO_ALL")  # type: ignore[arg-type]


def worker_class() -> type[Worker]:
    """Built in a function so that they are pickled by value: actors cannot import test modules."""

    class Adder(Worker):
        def __init__(self, offset: int) -> None:
            super().__init__()
            self.offset = offset

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, data: DataProto) -> DataProto:
            data.batch["x"] += self.offset + 100 * self.rank
            return data

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
        def first(self, number: int) -> int:
            return number + self.rank

        @register()
        def with_rank(self, number: float) -> float:
            return number + self.rank

        @register(execute_mode=Execute.RANK_ZERO)
        def length(self, numbers: list[int]) -> int:
            return len(numbers)

    return Adder


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_with_forked_workers(num_cpus=2):
        yield


def numbers(size: int, auto_padding: bool = False) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(size)}, auto_padding=auto_padding)


def test_a_users_workers(local_ray: None) -> None:
    adder = worker_class()
    pool = RayResourcePool([2], use_gpu=False)
    remote_class = ray.remote(adder)  # upstream's users decorate the class or wrap it
    with RayWorkerGroup(pool, RayClassWithInitArgs(remote_class, offset=10), num_cpus_per_worker=0.25) as group:
        assert group.add(numbers(4)).batch["x"].tolist() == [10, 11, 112, 113]
        padded = group.add(numbers(3, auto_padding=True))
        assert padded.batch["x"].tolist() == [10, 11, 112]  # the fourth row was padding
        assert group.first(5) == 5
        assert group.with_rank(0.5) == [0.5, 1.5] and group.with_rank([1, 2]) == [1, 3]  # one for all, or one each
        assert group.length([7, 7]) == 2


def test_the_workers_of_the_page_run(local_ray: None) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(# judge\.py\n.*?)```", page, flags=re.DOTALL)
    script: dict[str, Any] = {"__name__": "__main__"}  # a script's classes are pickled by value
    exec(code, script)
    batch = DataProto.from_dict({"lengths": torch.tensor([3, 5, 7])}, auto_padding=True)
    assert script["main"](batch).batch["score"].tolist() == [3.0, 5.0, 7.0]
