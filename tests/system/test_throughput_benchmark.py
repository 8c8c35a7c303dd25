"""The throughput benchmark on a machine without accelerator: one command, full responses, the figures at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.command import Command, read_metrics


@pytest.mark.slow
def test_the_random_init_script_measures_the_tiny_model(tmp_path: Path) -> None:
    environment = {"OUTPUT_DIR": tmp_path / "run", "STEPS": 2}
    arguments = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    script = "train_deepseekv3_256die_random_init.sh"
    with Command(tmp_path / "run.log", environment, arguments, script=script) as command:
        assert command.wait() == 0, command.tail()
        assert command.left_behind() == []
        said = command.text()
    steps = read_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["response_length/min"] == step["response_length/max"] == 64
    assert re.search(r"throughput +[\d,.]+ tokens per second and device", said)
    assert re.search(r"last step +[\d.]+ s: gen [\d.]+, ref [\d.]+", said)
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "dist_ckpt").exists()
