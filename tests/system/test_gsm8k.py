"""The quick start: its first command as it is, and Qwen3-0.6B's true shape on GSM8K's text, resumed and exported."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipes.common.tokenizer import CHATML, write_tokenizer
from tests.pages import ROOT
from tests.system.command import clean_environment
from tools.workshop.bench.models import model_config, write_checkpoint
from verl.trainer.config.override_text import override

DATA = ROOT.parent / "shared" / "data"
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 16384}
REWARD = """
import zlib
from verl.trainer.config.override_text import override

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(zlib.crc32(solution_str.encode()) % 2)  # random weights are never right: this gives gradients
"""


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    environment = clean_environment() | {"OUTPUT_DIR": str(tmp_path)}
    subprocess.run(["bash", "recipes/gsm8k/run.sh"], cwd=ROOT, env=environment, check=True, timeout=900)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [step["val/score"] for step in steps if "val/score" in step]
    assert scores[0] <= 0.5 and scores[-1] >= 0.8, scores
    assert all("val/greedy/score" in step for step in steps if "val/score" in step)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("widths", [SMALL, {}], ids=["small", "qwen3_0.6b"])
def test_a_model_of_ones_own_trains_resumes_and_is_exported(tmp_path: Path, widths: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (DATA / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"{DATA} has no GSM8K")
    model = tmp_path / "model"
    write_checkpoint(model_config("qwen3_0.6b") | {"bos_token_id": 0, "eos_token_id": 2} | widths, "bfloat16", model)
    rows = [json.loads(line) for line in (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = [row[key] for row in rows for key in ("question", "answer")]
    write_tokenizer(texts, model, vocab_size=16000, model_max_length=4096, form=CHATML)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (tmp_path / "reward.py").write_text(REWARD)
    # GSM8K itself, whatever the size
    given = {"MODEL_PATH": str(model), "INPUT_DIR": str(DATA), "DEGREES": "4", "NUM_SHOTS": "0"}
    overrides = [
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_response_length=64",
        "data.val_max_samples=4",
        override("custom_reward_function.path", tmp_path / "reward.py"),
    ]
    layout, chosen = tmp_path / "out" / "layout.json", []
    for num_steps in (2, 3):
        environment = clean_environment() | given | {"OUTPUT_DIR": str(tmp_path / "out"), "STEPS": str(num_steps)}
        command = ["bash", "recipes/gsm8k/run.sh", *overrides]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)
        chosen.append(layout.read_text(encoding="utf-8"))
    assert chosen[0] == chosen[1] and "gpu_memory_utilization" in chosen[0]
    text = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8")
    steps = [json.loads(line) for line in text.splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert all(step["actor/grad_norm"] > 0 for step in steps[1:])
    exported = tmp_path / "out" / "export_hf"
    trained, start = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (exported, model))
    assert trained.keys() == start.keys()
    assert any(not trained[name].equal(start[name]) for name in start)
    assert AutoTokenizer.from_pretrained(exported).chat_template == CHATML.template
