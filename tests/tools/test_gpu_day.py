"""A GPU day at tiny sizes on the CPU: all parts, without the packages that a bare GPU machine lacks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F

from tests.pages import ROOT
from tools.workshop.bench.models import CHECKPOINTS
from tools.workshop.gpu_day.parts import PARTS, ends_of_parts
from tools.workshop.gpu_day.rows import CUT_OFF, Row, Rows, line, page, read_rows
from tools.workshop.gpu_day.transfer import weights_of_another_process

# Only torch, triton, transformers, safetensors and numpy are there, with what they need themselves.
ABSENT = ("ray", "hydra", "omegaconf", "tensordict", "pyarrow", "pytest", "rich", "tensorboard", "fastapi")
REFUSE = f"""import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ImportError(f"{{name}} is not on a bare GPU machine")

sys.meta_path.insert(0, Refuse())
"""
LIMIT_S = 540  # the day's own limit; 60 to 200 s are usual, more beside other tests
needs_tables = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not hasattr(F, "grouped_mm"),
    reason="the CUDA tables need triton and torch.nn.functional.grouped_mm",
)


def run_day(out: Path, blocker: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(REFUSE, "utf-8")
    command = [sys.executable, "-m", "tools.workshop.gpu_day", "--out", str(out), "--device", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(blocker), str(ROOT)))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


# A decode step's time is a difference of two times, which noise can turn round where steps are tiny.
DIFFERENCES = ("decode", "fp8")


@needs_tables
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("parts", [("sleep",), pytest.param(tuple(PARTS), marks=pytest.mark.slow)], ids=["one", "all"])
def test_parts_run_on_a_cpu_and_what_must_hold_holds(tmp_path: Path, parts: tuple[str, ...]) -> None:
    ended = run_day(tmp_path / "day", tmp_path / "blocker", "--parts", *parts)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [Row(**row) for row in json.loads((tmp_path / "day" / "gpu_day.json").read_text("utf-8"))["rows"]]
    assert [row.part for row in found] == sorted((row.part for row in found), key=list(PARTS).index)
    assert {row.part for row in found} == set(parts)
    assert all(row.is_well for row in found if row.figure is None), found
    figures = [row for row in found if row.figure is not None]
    assert all(math.isfinite(row.figure) and row.is_well is None for row in figures), figures
    assert all(row.figure > 0 for row in figures if row.part not in DIFFERENCES), figures
    text = (tmp_path / "day" / "gpu_day.md").read_text("utf-8")
    assert all(row.name in text for row in found) and "WRONG" not in text


def test_a_day_without_time_begins_nothing_and_says_so(tmp_path: Path) -> None:
    ended = run_day(tmp_path / "day", tmp_path / "blocker", "--minutes", "0")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("0 of 0 bars met; 0 of 0 things as they must be; not finished: training ops (not")
    assert (tmp_path / "day" / "gpu_day.md").read_text("utf-8").count("not started") == 2 * len(PARTS)


def test_a_day_is_divided_by_the_parts_limits() -> None:
    ends = ends_of_parts(list(PARTS), 540)
    assert list(ends) == list(PARTS) and ends[list(PARTS)[-1]] == pytest.approx(540)
    assert ends["rollout ops"] / ends["training ops"] == pytest.approx(1 + 60 / 80)
    assert ends_of_parts(["sleep"], 60) == {"sleep": 60}  # alone it has the whole day


def test_the_page_begins_with_what_is_wrong() -> None:
    rows = [
        Row("decode", "MLA", 0.5, "of the limit", 0.6, is_well=False),
        Row("memory", "peak", 1.2, "of the plan", 0.9, is_well=True, most=1.3),
        Row("grpo step", "the ratio is 1", is_well=True),
        Row("sleep", CUT_OFF),
    ]
    text = page(rows, ["a GPU"])
    assert text.startswith(
        "# A GPU day\n\n- a GPU\n\n**1 of 2 bars met; 1 of 1 things as they must be; not finished: sleep"
    )
    assert text.index("Not as wanted") < text.index("| decode | MLA |") < text.index("Everything")
    assert line(rows[1]) == "well  memory: peak: 1.2 of the plan (wanted: at least 0.9, at most 1.3)"


@pytest.mark.slow
def test_weights_of_another_process_on_a_cpu(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "part.json", "rollout model", judges=False)
    weights_of_another_process(CHECKPOINTS["tiny"], "cpu", rows)
    assert [(row.is_well, row.note) for row in rows.rows] == [(True, "")]


def test_rows_are_kept_one_by_one_and_judged_on_a_gpu_alone(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    rows = Rows(path, "speed", judges=True)
    assert read_rows(path) == []
    rows.measured("decode", 0.5, "of the limit", 0.6)
    rows.measured("prefill", 0.5, "of the peak", 0.4)
    rows.holds("tokens", False, "3 | 4")
    assert [row.is_well for row in read_rows(path)] == [False, True, False]
    assert line(rows.rows[0]) == "WRONG speed: decode: 0.5 of the limit (wanted: at least 0.6)"
    assert "| speed | tokens |  | WRONG | 3 / 4 |" in page(rows.rows, ["a GPU"])
    rows.measured("memory", 1.2, "of the plan", 0.9, most=1.1)
    assert not read_rows(path)[-1].is_well
    unjudged = Rows(path, "speed", judges=False)
    unjudged.measured("decode", 0.5, "of the limit", 0.6)
    assert read_rows(path) == [Row("speed", "decode", 0.5, "of the limit", 0.6)]
