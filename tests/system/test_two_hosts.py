"""The same script on two hosts (network namespaces) forms one Ray cluster; a missing node is named in time."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.system.command import Command, newest_step, read_metrics, without_measurements
from tests.system.jobs import SMALL, Job, Prepared
from tools.launch import network
from tools.launch.head_run import MOST_WATCHES

HEAD, WORKER = "10.79.0.1", "10.79.0.2"
UNREACHABLE = "192.0.2.77"  # of a block that documentation alone uses
LOST_S = 5.0
NOTICE_S = 30.0
OVER_BOTH = "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2"  # the config has the devices of one host

pytestmark = pytest.mark.timeout(900)  # whole jobs; each wait has its own limit


@dataclass(frozen=True)
class Hosts:
    """Two namespaces joined by one cable: the head has HEAD, the worker WORKER."""

    head: str
    worker: str
    worker_interface: str

    def start(self, converted: Prepared, folder: Path, rank: int, steps: int) -> Command:
        """The same command on one of them, but for NODE_RANK."""
        environment = converted.environment(
            folder / "run",
            STEPS=steps,
            NNODES=2,
            NPUS_PER_NODE=1,
            MASTER_ADDR=HEAD,
            NODE_RANK=rank,
            RAY_PORT=6766,
            LOST_TIMEOUT_S=LOST_S,
            OMP_NUM_THREADS=1,  # a host's one worker would take all of its cores, and other threads other last bits
        )
        prefix = ["ip", "netns", "exec", self.worker if rank else self.head]
        return Command(folder / f"node{rank}.log", environment, ("--no-plan", *converted.arguments, OVER_BOTH), prefix)

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.worker, "link", "set", self.worker_interface, "down")


def ip(*arguments: str) -> None:
    """Run iproute2's ``ip``; CalledProcessError holds what it says."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Made by the test and removed after it; a machine that cannot have them skips, and says why."""
    if os.geteuid() != 0:
        pytest.skip("two hosts need network namespaces, and those need root")
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces, and those need `ip` (Debian: apt-get install iproute2)")
    names = [f"r1z{os.getpid()}{letter}" for letter in "hw"]
    ends = [f"r1z{os.getpid() % 10**7}{letter}" for letter in "hw"]  # an interface's name has at most 15 characters
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            pair = ("netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
            ip("link", "add", ends[0], *pair)
            for name, end, address in zip(names, ends, (HEAD, WORKER), strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield Hosts(names[0], names[1], ends[1])
    finally:
        for name in made:
            ip("netns", "del", name)


def assert_equal_to_one_host(folder: Path, uninterrupted: Job) -> None:
    """The metrics of the first two steps are those of two workers on one host."""
    mine, expected = read_metrics(folder / "run")[:3], read_metrics(uninterrupted.output_dir)[:3]
    assert [step["step"] for step in mine] == [0, 1, 2]
    assert without_measurements(mine) == without_measurements(expected)


@pytest.mark.slow
def test_two_hosts_end_together(hosts: Hosts, converted: Prepared, uninterrupted: Job, tmp_path: Path) -> None:
    """One worker on each host; the run ends well on both."""
    with (
        hosts.start(converted, tmp_path, rank=0, steps=2) as head,
        hosts.start(converted, tmp_path, rank=1, steps=2) as worker,
    ):
        assert head.wait() == 0, head.tail()
        assert worker.wait(timeout_s=NOTICE_S) == 0, worker.tail()
        assert head.left_behind() == worker.left_behind() == []
        assert "the run is complete" in worker.text()
    assert_equal_to_one_host(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_run_that_succeeds_ends_well_everywhere_without_its_watch(
    hosts: Hosts, converted: Prepared, tmp_path: Path
) -> None:
    """The process that watches the nodes is killed each time that it is started, for as long as it is replaced."""
    with (
        hosts.start(converted, tmp_path, rank=0, steps=2) as head,
        hosts.start(converted, tmp_path, rank=1, steps=2) as worker,
    ):
        for _ in range(MOST_WATCHES):
            head.wait_for(lambda: head.find("launch.nodes watch"), "watch").kill()
            head.wait_for(lambda: head.find("launch.nodes watch") is None, "dead watch")
        assert head.wait() == 0, head.tail()
        assert worker.wait(timeout_s=NOTICE_S) == 0, worker.tail()
        assert head.text().count("another one is started") == MOST_WATCHES - 1
        assert "a lost node now shows when a worker on it is missed" in head.text()


def test_two_hosts_meet_and_end_when_the_cable_is_pulled(hosts: Hosts, converted: Prepared, tmp_path: Path) -> None:
    """As soon as they are one cluster, before the driver has started."""
    with (
        hosts.start(converted, tmp_path, rank=0, steps=1000) as head,
        hosts.start(converted, tmp_path, rank=1, steps=1000) as worker,
    ):
        head.wait_for(lambda: f"Ray has all 2 nodes: {HEAD}, {WORKER}" in head.text(), "cluster of two nodes")
        assert f"{WORKER} (node 1) joined" in head.text()
        cut_and_expect_the_end(hosts, head, worker)


def cut_and_expect_the_end(hosts: Hosts, head: Command, worker: Command) -> None:
    """Both ends of the cable must name the other one in time, and end with all that they started."""
    gone = time.monotonic()
    hosts.cut()
    assert head.wait(timeout_s=NOTICE_S) == 1
    print(f"cut off: the head ended {time.monotonic() - gone:.1f} s later")
    assert f"node {WORKER} (node 1) went away" in head.text()
    assert worker.wait(timeout_s=NOTICE_S - (time.monotonic() - gone)) == 1
    assert f"the head {HEAD} went away: it gave no sign of life for {LOST_S:g} s" in worker.text()
    assert head.left_behind() == worker.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_two_hosts_train_as_one_until_one_goes_away(
    hosts: Hosts, converted: Prepared, uninterrupted: Job, tmp_path: Path, how: str
) -> None:
    """Two steps equal those of one host; then all processes of the other node die, or its cable is pulled."""
    with (
        hosts.start(converted, tmp_path, rank=0, steps=1000) as head,
        hosts.start(converted, tmp_path, rank=1, steps=1000) as worker,
    ):
        head.wait_for(lambda: head.worker(0), "rank 0 on the head")
        head.wait_for(lambda: worker.worker(1), "rank 1 on the other node")
        assert head.worker(1) is None
        assert f"{WORKER} (node 1) joined" in head.text()
        assert f"Ray has all 2 nodes: {HEAD}, {WORKER}" in head.text()
        head.wait_for(lambda: newest_step(tmp_path / "run") >= 2, "the second checkpoint")
        if how == "cut off":
            cut_and_expect_the_end(hosts, head, worker)
        else:
            worker.end()
            assert head.wait(timeout_s=NOTICE_S) == 1
            assert f"node {WORKER} (node 1) went away" in head.text() and head.left_behind() == []
        assert "run the same command again to continue from" in head.text()
    assert_equal_to_one_host(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "name"), [(1, "raylet/raylet"), (0, "-m verl.trainer.main_ppo")])
def test_a_part_that_dies_ends_both(hosts: Hosts, converted: Prepared, tmp_path: Path, rank: int, name: str) -> None:
    """Ray on the other node, or the driver on the head, is killed: both launchers live, and both end."""
    with (
        hosts.start(converted, tmp_path, rank=0, steps=1000) as head,
        hosts.start(converted, tmp_path, rank=1, steps=1000) as worker,
    ):
        head.wait_for(lambda: newest_step(tmp_path / "run"), "the first checkpoint")
        victim = (head, worker)[rank].find(name)
        assert victim is not None
        victim.kill()
        started = time.monotonic()
        assert head.wait(timeout_s=NOTICE_S) == 1
        assert worker.wait(timeout_s=NOTICE_S - (time.monotonic() - started)) == 1
        assert head.left_behind() == worker.left_behind() == []
        if rank == 1:
            assert WORKER in head.text().split("step 1 ")[-1]
            assert f"Ray on this node ({WORKER})" in worker.text()
        else:
            assert f"pid {victim.pid}) was killed by SIGKILL" in head.text()
            assert f"the head {HEAD} ended the run" in worker.text()


@pytest.mark.slow  # tests/recipes: test_nodes.py has a missing node, test_many_nodes.py one that ssh cannot reach
def test_a_node_that_never_comes_is_named(converted: Prepared, tmp_path: Path) -> None:
    """The head gives up after JOIN_TIMEOUT_S, before it has prepared anything."""
    own = network.address_towards(None, None)
    if network.is_loopback(own):
        pytest.skip("a head of several nodes needs a network, and no interface here has another address than 127.0.0.1")
    environment = converted.environment(
        tmp_path / "run", NNODES=2, NPUS_PER_NODE=1, MASTER_ADDR=own, NODE_RANK=0, JOIN_TIMEOUT_S=2
    )
    with Command(tmp_path / "head.log", environment, SMALL) as head:
        assert head.wait() == 1, head.tail()
        assert f"1 of 2 nodes were there after 2 s: {own} (this head)" in head.text()
        assert f"missing: node 1. Start the same script there with MASTER_ADDR={own}" in head.text()
        assert head.left_behind() == []
    assert not (tmp_path / "run" / "data").exists()


def test_a_head_that_never_comes_is_named(converted: Prepared, tmp_path: Path) -> None:
    """The other node gives up after HEAD_TIMEOUT_S."""
    environment = converted.environment(
        tmp_path / "run", NNODES=2, NPUS_PER_NODE=1, MASTER_ADDR=UNREACHABLE, NODE_RANK=1, HEAD_TIMEOUT_S=2
    )
    with Command(tmp_path / "worker.log", environment, SMALL) as worker:
        assert worker.wait() == 1, worker.tail()
        assert f"the head {UNREACHABLE}:" in worker.text()
        assert "within 2 s: is the script running there, with this MASTER_ADDR?" in worker.text()
        assert worker.left_behind() == []
