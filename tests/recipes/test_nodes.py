"""The nodes of a run on a real Ray: all are waited for, compared, ended by the head; a lost one is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.ray_workers import LEAN, forked_workers
from tools.launch import nodes
from tools.launch.ray_node import loss_variables

PATIENCE_S = 60.0  # a safety net on busy machines
LOST_S = 5.0
FACTS = {"configuration": "c1", "torch": "2.13.0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head alone, as each test leaves it; the nodes of this machine share its address, and Ray tells them apart."""
    head = {**LEAN, "num_cpus": 0, "labels": {**FACTS, nodes.RANK: "0"}}
    with forked_workers(), pytest.MonkeyPatch.context() as patch:
        for name, value in loss_variables(LOST_S).items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(cluster.address, log_to_driver=False)
            yield cluster
            ray.shutdown()
        finally:
            cluster.shutdown()


def add(cluster: Cluster, labels: dict[str, str], **variables: str) -> Any:
    return cluster.add_node(num_cpus=1, labels={**FACTS, **labels, nodes.RANK: "1"}, env_vars=variables, **LEAN)


def test_nodes_join_are_compared_ended_and_missed(cluster: Cluster, tmp_path: Path) -> None:
    """At last one is lost without a word, which is noticed."""
    assert nodes.join(1, 0.0) is None
    other = add(cluster, {"configuration": "c2", "torch": "2.5.1"})
    problem = nodes.join(3, PATIENCE_S) or ""
    assert "(node 1) does not fit the head: its configuration is not the head's: start the same script" in problem
    assert "torch is 2.5.1, the head has 2.13.0" in problem
    cluster.remove_node(other)

    end_file = tmp_path / "end.json"
    fits = add(cluster, {}, **{nodes.END_FILE: str(end_file)})
    problem = nodes.join(3, 1.0) or ""
    assert problem.startswith("2 of 3 nodes were there after 1 s: ") and "; missing: node 2. Start the same" in problem
    assert nodes.join(2, PATIENCE_S) is None

    nodes.end(1, "a reason")
    deadline = time.monotonic() + PATIENCE_S
    while not end_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert json.loads(end_file.read_text()) == {"status": 1, "reason": "a reason"}

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(nodes.watch, 2)
        time.sleep(1.0)
        assert not watching.done()
        cluster.remove_node(fits, allow_graceful=False)
        assert "(node 1) went away: " in watching.result(PATIENCE_S)
    assert "(node 1) went away: " in nodes.watch(2), "before it began"
