"""Half runs of the real model: training from records is the recorded run, generating alone is its first half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.pages import undocumented
from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import STEPS, Job, Prepared
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.trainer.ppo.observers import steps_of
from verl.trainer.preflight import preflight_problems

ENGINE = "actor_rollout_ref.actor.megatron"
SETTINGS = {
    "one update, experts over both ranks": (),
    "two updates, both pipeline stages replay the rollout's routing": (
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{ENGINE}.expert_model_parallel_size=1",
        f"{ENGINE}.pipeline_model_parallel_size=2",
        f"{ENGINE}.num_layer_list=[2,1]",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        "actor_rollout_ref.actor.router_replay.mode=R3",
    ),
    "groups chosen from several generations": ("algorithm.filter_groups={enable:True,metric:score}",),
}

pytestmark = pytest.mark.timeout(600)


def trained(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the steps but for validation and measurements."""
    left_out = ("timing_", "perf/", "memory/", "val")
    rows = [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in read_metrics(folder)]
    return [row for row in rows if row["step"]]


@pytest.mark.slow  # three runs of the recipe
@pytest.mark.parametrize("setting", SETTINGS)
def test_halves_of_a_run_are_those_of_the_whole(
    local_ray: None, converted: Prepared, uninterrupted: Job, tmp_path: Path, setting: str
) -> None:
    whole, again, rolled = (tmp_path / name for name in ("whole", "again", "rolled"))
    more = SETTINGS[setting]
    if more:
        fit(in_process_config(converted, whole, 2, STEPS, "trainer.save_rollouts=True", *more))
    else:
        whole = uninterrupted.output_dir
    records = whole / "rollouts"
    assert steps_of(records, "*") == list(range(1, STEPS + 1))

    only = in_process_config(converted, again, 2, STEPS, override("trainer.train_only", records), *more)
    assert preflight_problems(only) == []
    fit(only)
    assert trained(again) == trained(whole) and len(trained(again)) == STEPS
    assert not any(name.startswith("val") for row in read_metrics(again) for name in row)
    for path in (whole / "export_hf").iterdir():
        assert (again / "export_hf" / path.name).read_bytes() == path.read_bytes(), path.name
    for name in ("samples/step_2.jsonl", f"checkpoints/global_step_{STEPS}/data.json"):
        assert (again / name).read_bytes() == (whole / name).read_bytes(), name

    fit(in_process_config(converted, rolled, 2, 1, "trainer.rollout_only=True", *more))
    mine, expected = (load_file(folder / "rollouts" / "step_1.safetensors") for folder in (rolled, whole))
    assert mine.keys() == expected.keys() >= {"input_ids", "responses", "rollout_log_probs", "token_level_scores"}
    assert all(mine[name].equal(expected[name]) for name in expected)
    with safe_open(rolled / "rollouts" / "step_1.safetensors", framework="pt") as opened:
        described = json.loads(opened.metadata()["rollouts"])
    assert len(described["columns"]["uid"]) == 32 and described["loader"]["batch_index"] >= 1
    assert {"reward_ledger", "rollouts", "metrics.jsonl"} <= {path.name for path in rolled.iterdir()}
    assert not (rolled / "checkpoints").exists() and not (rolled / "export_hf").exists()
    assert undocumented(name for folder in (whole, again, rolled) for row in read_metrics(folder) for name in row) == []


def test_halves_that_cannot_run_are_told_before_anything_starts(prepared: Prepared, tmp_path: Path) -> None:
    problems = "\n".join(validate_config(load_config(["trainer.rollout_only=True", "trainer.train_only=records"])))
    assert "trainer.rollout_only and trainer.train_only are set: with trainer.train_only nothing is gener" in problems
    beside = ["trainer.schedule=one_step_off", "trainer.save_rollouts=True"]
    assert "trainer.save_rollouts is set: that is there with trainer.schedule=sync" in "\n".join(
        validate_config(load_config(beside))
    )
    config = in_process_config(prepared, tmp_path, 2, STEPS, override("trainer.train_only", tmp_path / "absent"))
    assert f"{tmp_path / 'absent'} has no records step_*.safetensors" in "\n".join(preflight_problems(config))
    (tmp_path / "step_2.safetensors").touch()
    config = in_process_config(prepared, tmp_path, 2, STEPS, override("trainer.train_only", tmp_path))
    assert "has records up to step 2, but trainer.total_training_steps is 4" in "\n".join(preflight_problems(config))
