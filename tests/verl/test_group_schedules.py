"""Dynamic sampling of groups as they end, on a real Ray with the tiny model, in each schedule; resumed to the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.system.command import without_measurements
from tests.verl.bandit import write_inputs
from tests.verl.test_schedules import PROMPTS, SAMPLES, SEPARATE, TWO_ROLLOUT_RANKS, train
from verl.trainer.config.override_text import override

FILTER = (
    "algorithm.filter_groups={enable:True,metric:score,stop_early:%s}",
    override("custom_reward_function.path", Path(__file__).with_name("rewards_by_length.py")),
    "actor_rollout_ref.rollout.max_num_seqs=24",
)
EARLY = (FILTER[0] % "True", *FILTER[1:], "data.gen_batch_size=10", "async_training.steps_per_call=2")
SYNC = tuple(setting for setting in EARLY if not setting.startswith("async_training"))
SCHEDULES = {
    "sync": SYNC,
    "one_step_off": (*SYNC, *SEPARATE, "trainer.schedule=one_step_off"),
    "fully_async, whole samples": (
        *EARLY,
        *SEPARATE,
        *TWO_ROLLOUT_RANKS,
        "trainer.schedule=fully_async",
        "async_training.partial_rollout=False",
        "async_training.fixed_order=True",
        "async_training.trigger_parameter_sync_step=2",
    ),
    "fully_async": (
        *(FILTER[0] % "False", *FILTER[1:]),
        *SEPARATE,
        "trainer.schedule=fully_async",
        "async_training.steps_per_call=2",
        "async_training.fixed_order=True",
    ),
}


def write_long_tail(root: Path) -> None:
    """Prompts of which one in four has answers of 60 tokens, and the others of 2 to 5."""
    write_inputs(root)
    rows = pq.read_table(root / "data.parquet").to_pylist()
    for index, row in enumerate(rows):
        row["extra_info"]["max_response_length"] = 60 if index % 4 == 0 else 2 + index % 4
    pq.write_table(pa.Table.from_pylist(rows), root / "data.parquet")


def lines_of(root: Path, folder: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / folder / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.slow  # tests/verl/test_group_sampling.py has the choice of groups without engines
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCHEDULES)
def test_groups_that_differ_are_trained_on_and_a_resumed_run_is_the_same(
    local_ray: None, tmp_path: Path, name: str
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for root in (whole, halves):
        root.mkdir()
        write_long_tail(root)
    write_tiny_checkpoint(whole / "model", tiny_hf_config(vocab_size=300), seed=1, dtype=torch.float32)
    settings = (
        *SCHEDULES[name],
        override("actor_rollout_ref.model.path", whole / "model"),
        "data.max_response_length=60",
    )
    expected = train(whole, 4, *settings)
    for steps in (2, 4):
        found = train(halves, steps, *settings)
    assert without_measurements(found) == without_measurements(expected)
    uids = []
    for step in range(1, 5):
        rows = lines_of(whole, "samples", step)
        assert rows == lines_of(halves, "samples", step)
        uids += [row["uid"] for row in rows]
        scores: dict[str, set[float]] = {}
        for line in lines_of(whole, "reward_ledger", step):
            scores.setdefault(line["uid"], set()).add(line["score"])
        assert all(len(scores[row["uid"]]) > 1 for row in rows)
    assert len(set(uids)) == 4 * PROMPTS and len(uids) == 4 * PROMPTS * SAMPLES
    assert all(0 < record["train/kept_groups_ratio"] <= 1 for record in expected)
    if name != "fully_async":
        assert sum(record["train/aborted_groups"] for record in expected) > 0
