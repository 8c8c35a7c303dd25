"""What ``ray_kwargs.ray_init`` asks of Ray."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray

from verl.trainer.config import load_config
from verl.trainer.main_ppo import _init_ray

RAY_INIT = "ray_kwargs.ray_init"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), {}),
        (("num_cpus=3",), {"address": "local", "num_cpus": 3, "num_gpus": None}),
        (("num_gpus=0",), {"address": "local", "num_cpus": None, "num_gpus": 0}),
        (("num_cpus=3", "num_gpus=2"), {"address": "local", "num_cpus": 3, "num_gpus": 2}),
    ],
)
def test_sizes_start_a_cluster_of_the_runs_own(
    given: tuple[str, ...], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **arguments: calls.append(arguments))
    _init_ray(load_config([f"{RAY_INIT}.{item}" for item in given]))
    assert calls == [asked | {"include_dashboard": False, "runtime_env": {}}]


def test_variables_reach_this_process_and_those_that_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("RAY_ADDRESS", "there:1")
    monkeypatch.setenv("OF_THE_RUN", "before")
    monkeypatch.setattr(ray, "init", lambda **arguments: calls.append(arguments))
    _init_ray(load_config([f"+{RAY_INIT}.runtime_env.env_vars.OF_THE_RUN=7"]))
    assert [(call["address"], call["runtime_env"]) for call in calls] == [
        ("there:1", {"env_vars": {"OF_THE_RUN": "7"}})
    ]
    assert os.environ["OF_THE_RUN"] == "7"


def test_variables_that_are_none_are_a_problem_of_the_config() -> None:
    (problem,) = load_config([f"+{RAY_INIT}.runtime_env.env_vars=7"]).ray_kwargs.problems("ray_kwargs")
    assert problem.endswith("; give env_vars as {NAME: value}")
