"""What becomes of a run when a stage after the training or its live page fails, and what its last lines say."""

from __future__ import annotations

import io
import json
import shlex
import socket
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from recipes.common.recipe import load_recipe
from tools.launch import checks
from tools.launch.head_run import HeadRun
from tools.launch.job import Job, resolve_config
from tools.launch.processes import RunFailed
from tools.launch.roles import find_role
from tools.launch.serve_lines import serve_lines
from tools.launch.settings import read_settings
from tools.launch.stages import Stage, closing_stages


def _job(output_dir: Path, recipe: str = "r1_zero", *overrides: str, **variables: str) -> Job:
    settings = read_settings(load_recipe(recipe), overrides, {"OUTPUT_DIR": str(output_dir), **variables})
    return Job(settings, resolve_config(settings))


def test_only_the_report_is_optional(tmp_path: Path) -> None:
    assert {stage.name: stage.is_optional for stage in closing_stages(_job(tmp_path, "math_lighteval"))} == {
        "shards_to_hf": False,
        "report": True,
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (None, "no metrics.jsonl there"),
        ("", "no step is logged yet"),
        ('{"step": 1, "critic/score/mean": "high"}\n', "critic/score/mean is 'high'"),
    ],
)
def test_a_report_that_fails_is_one_line_and_no_failure(tmp_path: Path, metrics: str | None, why: str) -> None:
    job = _job(tmp_path)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    out = io.StringIO()
    run = HeadRun(job, find_role(job.settings, job.nnodes), Console(file=out, width=500))
    *_, report = closing_stages(job)
    run._run_stage(report)
    run.processes.end_all()
    (line,) = (line for line in out.getvalue().splitlines() if "The training is complete" in line)
    assert line.startswith("stage Results (pid ") and "ended with exit status 2; its output is in" in line
    assert why in line and "Results done" not in out.getvalue()
    with pytest.raises(RunFailed, match="stage Results .* ended with exit status 2"):
        run._run_stage(Stage(report.name, report.title, report.command))


def test_the_port_of_the_live_page_is_free_and_its_own(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = checks.live_problems(_job(tmp_path, "r1_zero", f"trainer.live_report={port}"))
        assert problem.startswith(f"trainer.live_report {port} cannot be used on this machine: Address already in use")
        assert problem.endswith("set trainer.live_report to a free port")
    for name in ("RAY_PORT", "MASTER_PORT"):
        job = _job(tmp_path, "r1_zero", f"trainer.live_report={port}", **{name: str(port)})
        assert checks.live_problems(job) == [
            f"trainer.live_report and {name} are both {port}; give each a port of its own"
        ]
    for off in ("0", "null"):
        assert checks.live_problems(_job(tmp_path, "r1_zero", f"trainer.live_report={off}")) == []
    (problem,) = checks.config_problems(_job(tmp_path, "r1_zero", "trainer.live_report=80"))
    assert "trainer.live_report is 80; give a port from 1024 to 65535, or 0 for none" in problem


def test_a_live_page_that_ends_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    """Here it ends because its port is taken between the check and its start."""
    out = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job = _job(tmp_path, "r1_zero", f"trainer.live_report={taken.getsockname()[1]}")
        run = HeadRun(job, find_role(job.settings, job.nnodes), Console(file=out, width=500))
        run._start_live_report()
        assert run.live is not None
        deadline = time.monotonic() + 120
        while run.live is not None and time.monotonic() < deadline:
            run._check()
            time.sleep(0.05)
    run._check()
    run.processes.end_all()
    url, line = out.getvalue().splitlines()
    assert url == f"live report: http://127.0.0.1:{job.config.trainer.live_report}/"
    assert line.startswith("the live report ended with exit status 2, and the run goes on without it: error: --serve")


@pytest.mark.parametrize("recipe", ["gsm8k", "math_lighteval"])
def test_the_last_lines_serve_and_ask_the_trained_model(tmp_path: Path, recipe: str) -> None:
    """In a folder with a space and a quote, with a held-out problem that has quotes."""
    job = _job(tmp_path / "Tom's run", recipe)
    assert serve_lines(job) == [], "nothing is exported yet"
    name = "export_hf" if recipe == "gsm8k" else "trained_hf/global_step_7"
    model = tmp_path / "Tom's run" / name
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "Tom's run" / "checkpoints").mkdir()
    (tmp_path / "Tom's run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("7")
    _, serve, _, ask = serve_lines(job)
    command = shlex.split(serve)
    assert command[command.index("--model") + 1] == str(model) and command[0] == "env"
    assert json.loads(shlex.split(ask)[-1])["messages"] == [{"role": "user", "content": "1 + 2 = ?"}]
    messages = [{"role": "user", "content": 'Tom\'s "1 + 1"\nis é?'}]
    row = {"data_source": "x", "prompt": messages, "reward_model": {"ground_truth": "2"}}
    (tmp_path / "Tom's run" / "data" / "eval").mkdir(parents=True)
    for path in ("test", "eval/test"):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "Tom's run" / "data" / f"{path}.parquet")
    asked = shlex.split(serve_lines(job)[-1])
    body = json.loads(asked[-1])
    assert asked[1].endswith(":8000/v1/chat/completions") and body["messages"] == messages
    assert body["max_tokens"] == job.config.data.max_response_length
