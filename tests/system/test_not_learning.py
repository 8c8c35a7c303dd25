"""Runs of the real model that cannot learn, each for one reason, which is named; without a fault nothing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import Prepared
from verl.trainer.config.override_text import override

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # tests/verl/test_learning.py has a run with signs

LARGE = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "trainer.test_freq=6")


def _names(folder: Path) -> list[list[str]]:
    rows = read_metrics(folder)
    return [[name.removeprefix("signs/") for name in row if name.startswith("signs/")] for row in rows if row["step"]]


def _run(converted: Prepared, folder: Path, *overrides: str) -> list[list[str]]:
    fit(in_process_config(converted, folder, 2, 6, *LARGE, "trainer.export_hf=False", *overrides))
    return _names(folder)


def test_a_run_without_a_fault_names_nothing(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    assert not any(_run(converted, tmp_path))


def test_a_limit_of_8_tokens_is_named(
    local_ray: None, converted: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = _run(converted, tmp_path, "data.max_response_length=8")
    assert names[1][0] == names[-1][0] == "answers_cut", names
    lines = [text for text in caplog.messages if "has a sign" in text]
    assert lines[0].startswith("step 2 has a sign of not learning, answers_cut")


def test_a_learning_rate_that_breaks_the_model_is_named(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    names = _run(converted, tmp_path, "actor_rollout_ref.actor.optim.lr=0.3")
    assert names[0] == [] and names[-1], names
    assert names[-1][0] in ("skipped_update", "entropy_collapse", "entropy_runaway", "kl_runaway"), names


def test_a_form_that_the_model_never_writes_is_named(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    names = _run(converted, tmp_path, "custom_reward_function.path=recipes/gsm8k/reward.py")
    assert names[-1][0] == "no_format", names


def test_a_template_that_the_model_does_not_know_is_named(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(converted.model_path, model)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    template = "{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}"  # Llama 2's
    path.write_text(json.dumps(settings | {"chat_template": template}))
    names = _run(converted, tmp_path / "run", override("actor_rollout_ref.model.path", model))
    assert names[-1], names
    assert names[-1][0] in ("no_format", "answers_cut"), names
