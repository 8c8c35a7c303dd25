"""A host of a training on two is lost and does not come back: all start anew, on a spare too, to the same result.

The hosts are Ray nodes of one machine, which Ray tells apart though they share its address.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.system.command import newest_step, read_metrics, without_measurements
from tests.system.in_process import in_process_config
from tests.system.jobs import Prepared
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recovery import fit_with_restarts
from verl.trainer.ppo.reward_process import make_reward_fn
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.megatron_workers import ActorRolloutRefWorker

STEPS = 4
PATIENCE_S = 400.0  # a safety net on busy machines

pytestmark = pytest.mark.timeout(1200)  # two whole runs


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    """One for the driver alone, two to train, one to spare."""
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def fit(prepared: Prepared, folder: Path) -> None:
    """Trains to the end, one worker on each of two hosts, through as many restarts as it takes."""
    config = in_process_config(prepared, folder, 1, STEPS, "trainer.nnodes=2")
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    reward_fn = make_reward_fn(config, tokenizer)

    def new_trainer(config: PPOTrainerConfig, metrics: Mapping[str, float]) -> RayPPOTrainer:
        return RayPPOTrainer(config, tokenizer, ActorRolloutRefWorker, reward_fn, run_metrics=metrics)

    try:
        fit_with_restarts(config, new_trainer)
    finally:
        reward_fn.close()


def host_of(hosts: Cluster, rank: int) -> Any:
    """The node of the worker of ``rank``; None while there is none."""
    for node in hosts.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in raylet.children(recursive=True):
            try:
                is_worker = "ray::WorkerProcess" in " ".join(process.cmdline())
                if is_worker and process.environ().get("RANK") == str(rank):
                    return node
            except psutil.NoSuchProcess:
                continue
    return None


def num_living_hosts() -> int:
    """As far as Ray knows."""
    return sum(node["Alive"] for node in ray.nodes())


@pytest.mark.slow  # tests/verl/test_spare_node.py loses two hosts of the smallest policy
def test_a_lost_host_is_replaced_by_a_spare_one(hosts: Cluster, prepared: Prepared, tmp_path: Path) -> None:
    """That of rank 1, behind the first checkpoint."""
    whole, struck = tmp_path / "whole", tmp_path / "struck"
    fit(prepared, whole)
    lost: list[Any] = []

    def strike() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not newest_step(struck) and time.monotonic() < deadline:
            time.sleep(0.05)
        lost.append(host_of(hosts, rank=1))
        hosts.remove_node(lost[0], allow_graceful=False)

    striker = threading.Thread(target=strike)
    striker.start()
    fit(prepared, struck)
    striker.join()
    restarts = [json.loads(line) for line in (struck / "restarts.jsonl").read_text().splitlines()]
    assert len(restarts) == 1 and "rank 1" in restarts[0]["cause"] and restarts[0]["from_step"] >= 1
    deadline = time.monotonic() + PATIENCE_S
    while num_living_hosts() > 3 and time.monotonic() < deadline:  # Ray's health checks may take longer than the job
        time.sleep(0.1)
    assert num_living_hosts() == 3 and lost[0] is not None
    assert not (whole / "restarts.jsonl").exists()
    assert without_measurements(read_metrics(struck)) == without_measurements(read_metrics(whole))
    for path in (whole / "export_hf").glob("*.safetensors"):
        assert (struck / "export_hf" / path.name).read_bytes() == path.read_bytes()
