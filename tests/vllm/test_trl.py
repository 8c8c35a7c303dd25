"""TRL's GRPOTrainer trains on our engine in its own process, and the engine follows the trainer's weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipes.common.tokenizer import write_tokenizer
from tests.mindspeed_llm.tiny import tiny_qwen3_config, write_tiny_checkpoint
from tests.vllm.clients import clients_python, run_client
from tests.vllm.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(TINY | {"vocab_size": 400}, [], id="deepseek-v3"),
        pytest.param(tiny_qwen3_config(vocab_size=400), ["--sleep"], id="qwen3, sleeping while it trains"),
    ],
)
def test_five_steps(config: dict[str, Any], options: list[str], tmp_path: Path) -> None:
    clients_python()  # or skip, before anything is made
    write_tiny_checkpoint(tmp_path / "model", config)
    write_tokenizer([f"What is {i} + {i}?" for i in range(50)], tmp_path / "model", 400, 640)
    result = tmp_path / "result.json"
    run_client([str(Path(__file__).with_name("trl_program.py")), "model", str(result), *options], tmp_path)
    found = json.loads(result.read_text())
    assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5]
    for step in found["steps"]:
        assert math.isfinite(step["loss"]) and step["grad_norm"] > 0
        # Each step's samples came from the weights that the trainer had then.
        assert step["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert found["num_changed"] == found["num_weights"]
    assert found["is_greedy"] and found["logprob_gap"] < TOLERANCE
