"""The six commands of the README, in order: install, run, look, change the reward and resume, serve, ask the model."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.common.arithmetic import solution_of
from recipes.r1_zero.json_to_parquet import SYSTEM_TEMPLATE
from tests.pages import ROOT
from tests.system.command import newest_step, read_metrics
from tests.system.in_process import run_stages_here
from tests.system.jobs import Job, Prepared
from tests.vllm.serving import server_process
from tools.report.__main__ import main as report

pytestmark = pytest.mark.timeout(900)


def _six_commands() -> list[list[str]]:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Six commands\n")[1].split("\n## ")[0]
    return [shlex.split(line) for line in section.splitlines() if line.startswith("    ") and line[4] != " "]


def test_the_question_has_the_form_of_the_training_data() -> None:
    """With another system sentence, or without, the model answers a question that it has never seen."""
    [data] = [word.removeprefix("@") for word in _six_commands()[-1] if word.startswith("@")]
    system, user = json.loads((ROOT / data).read_text(encoding="utf-8"))["messages"]
    assert system == {"role": "system", "content": SYSTEM_TEMPLATE}
    assert solution_of(user["content"]).endswith("= 15")


def test_a_new_user_gets_from_nothing_to_an_answer(
    prepared: Prepared, uninterrupted: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``uninterrupted`` is a user's run of the second command; here it goes on, with weights and data made anew."""
    install, run, look, change, serve, ask = _six_commands()
    script = ["bash", "recipes/r1_zero/ray_start_grpo_npu.sh"]
    assert install[:2] == ["bash", "tools/setup_env.sh"]  # tests/tools/test_setup_env.py
    assert run == script
    made = shutil.ignore_patterns("base_model_bf16", "dist_ckpt", "data")
    output = Path(shutil.copytree(uninterrupted.output_dir, tmp_path / "run", ignore=made, symlinks=True))
    assert look[:4] == ["python", "-m", "tools.report", "--run-dir"]
    (output / "report.html").unlink()
    assert report(["--run-dir", str(output)]) == 0 and (output / "report.html").is_file()
    before = (output / "export_hf" / "model-00001-of-00001.safetensors").read_bytes()

    assert change[0].startswith("STEPS=") and change[1:3] == script
    with caplog.at_level(logging.INFO):
        run_stages_here(prepared, output, 5, *change[3:])
    assert "resumed after step 4" in caplog.text
    steps = read_metrics(output)
    assert newest_step(output) == 5 and [step["step"] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert "reward/format" in steps[4] and "reward/boxed" in steps[5], "another function graded the last step"
    assert (output / "export_hf" / "model-00001-of-00001.safetensors").read_bytes() != before

    assert serve[:3] == ["vllm", "serve", "outputs/r1_zero/export_hf"]
    with server_process(str(output / "export_hf"), 0, *serve[3:]) as (_, port):
        asked = [word.replace(":8000/", f":{port}/") for word in ask]
        done = subprocess.run([*asked, "--silent"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    assert choice["message"]["content"]
