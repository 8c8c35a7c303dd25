"""Generation on ranks of its own, in a fixed order: a killed rollout rank costs no sample and no bit of the result."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.pages import undocumented
from tests.system.command import read_metrics
from tests.system.jobs import Job, Prepared, assert_same_result

FULLY_ASYNC = (
    "trainer.schedule=fully_async",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.max_num_seqs=12",
    "async_training.staleness_threshold=2",
    "async_training.steps_per_call=4",
    "async_training.fixed_order=True",
    "async_training.keep_kv_cache=True",  # but behind a checkpoint, after which both runs compute it anew
    "trainer.save_freq=2",
    "algorithm.rollout_correction={rollout_is:token}",
    "ray_kwargs.num_cpus_per_worker=0.5",
    "trainer.log_samples_rows=32",
)
NUM_GROUPS, GROUP_SIZE = 8, 4

pytestmark = pytest.mark.timeout(900)  # three runs of the whole job


def trained_samples(job: Job) -> list[tuple[str, str]]:
    """(group, response) of every sample that was trained on, from the reward ledger."""
    lines = []
    for step in range(1, job.steps + 1):
        text = (job.output_dir / "reward_ledger" / f"step_{step}.jsonl").read_text()
        lines += [json.loads(line) for line in text.splitlines()]
    return [(line["uid"], line["response"]) for line in lines]


@pytest.mark.slow  # tests/verl/test_schedules.py has it for a smaller model on two ranks
def test_a_killed_rollout_rank_costs_no_sample_and_no_bit(prepared: Prepared, tmp_path: Path) -> None:
    here = {"NNODES": 1}  # one node does both
    whole, struck = (
        Job(prepared, tmp_path / name, overrides=FULLY_ASYNC, variables=here) for name in ("whole", "struck")
    )
    whole.finish()
    metrics = read_metrics(whole.output_dir)
    steps = [record for record in metrics if record["step"]]
    assert undocumented(name for record in metrics for name in record) == []
    assert steps[0]["schedule/staleness/max"] == 0 and steps[0]["training/rollout_probs_diff_max"] < 1e-4
    assert max(record["schedule/staleness/max"] for record in steps) == 2
    assert max(record["schedule/partial_samples"] for record in steps) > 0
    lines = [line for text in whole.sample_records().values() for line in text.decode().splitlines()]
    versions = [json.loads(line)["versions"] for line in lines]
    assert all(version < whole.steps for spans in versions for version, _ in spans)
    assert any(len(spans) > 1 for spans in versions)

    with struck.command("first", "trainer.max_restarts=0") as command:
        victim = command.wait_for(lambda: command.worker(rank=3), "rollout rank 3")
        command.wait_for(lambda: struck.newest_step >= 2, "checkpoint 2")
        victim.send_signal(signal.SIGKILL)
        assert command.wait(timeout_s=60) != 0
        assert f"rank 3 (pid {victim.pid} on" in command.text()
        assert command.left_behind() == []
    struck.finish()
    assert_same_result(struck, whole)
    samples = trained_samples(struck)
    assert samples == trained_samples(whole)
    groups = [group for group, _ in samples]
    assert len(samples) == whole.steps * NUM_GROUPS * GROUP_SIZE
    assert len(set(groups)) == whole.steps * NUM_GROUPS and all(groups.count(group) == GROUP_SIZE for group in groups)
