"""Bar 2: ``JSON_PATH`` may be a real file of problems; every one of its rows is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipes.common.recipe import ROOT

REAL_DATA = ROOT.parent / "shared" / "data" / "deepscaler_math_aime.json"


def test_every_row_of_the_real_set_is_accounted_for(tmp_path: Path) -> None:
    """Used, skipped with a reason, or a duplicate: nothing is lost, and the two null answers are named."""
    if not REAL_DATA.is_file():
        pytest.skip(f"{REAL_DATA} is not there")
    num_rows = len(json.loads(REAL_DATA.read_text(encoding="utf-8")))
    assert num_rows == 8449
    command = [sys.executable, "-m", "recipes.r1_zero.json_to_parquet"]
    command += ["--json_path", str(REAL_DATA), "--output_dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())
    report = json.loads((tmp_path / "data_report.json").read_text(encoding="utf-8"))
    nulls = [entry for entry in report["skipped"] if entry["reason"] == "answer is null"]
    assert len(nulls) == 2
    for entry in nulls:
        assert f"row {entry['index']}" in said
    counts = [pq.read_metadata(tmp_path / f"{side}.parquet").num_rows for side in ("train", "test")]
    left_out = sum(len(report[reason]) for reason in ("skipped", "duplicates", "over_long"))
    assert sum(counts) + left_out == num_rows
    assert f"{counts[0]} for training, {counts[1]} held out" in said
