"""A node of Ray's cluster that a run does not use takes the workers of one that went away; without one the run ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray_workers import LEAN, forked_workers
from tests.verl.bandit import bandit_config, write_inputs
from tests.verl.failing_bandit import run_failing
from tools.launch.ray_node import loss_variables
from verl.trainer.ppo.recovery import TrainingStoppedError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head that takes no workers, and two nodes with room for one worker each; on one machine."""
    for name, value in loss_variables(5.0).items():
        monkeypatch.setenv(name, value)
    with forked_workers():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **LEAN})
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, **LEAN)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
            ray.shutdown()
        finally:
            cluster.shutdown()


@pytest.mark.timeout(240)
def test_workers_move_to_the_spare_node_and_the_run_ends_when_none_is_left(cluster: Cluster, tmp_path: Path) -> None:
    """The node under the workers goes away in step 3, then the spare one in step 5."""
    write_inputs(tmp_path)
    failures = tmp_path / "failures"
    failures.mkdir()
    for step in (3, 5):
        (failures / str(step)).write_text("node 1")
    config = bandit_config(tmp_path, "ray_kwargs.num_cpus_per_worker=1", "trainer.start_timeout_s=5")
    with pytest.raises(TrainingStoppedError, match="cannot be started again: no room for .* missing: 1 CPU") as stop:
        run_failing(config, failures)
    assert stop.value.step == 5
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3, 4]
    assert len((tmp_path / "restarts.jsonl").read_text().splitlines()) == 2
