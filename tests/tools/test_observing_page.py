"""What docs/observing.md tells the reader to run and to find is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.tools.test_viewer import _record, _write
from tools.launch.job import resolve_config
from tools.launch.settings import read_settings
from tools.viewer.__main__ import main
from tools.viewer.records import FIELDS
from verl.trainer.config import validate_config
from verl.trainer.config.trainer import TrainerConfig
from verl.trainer.ppo.sample_records import SampleRecords
from verl.workers import megatron_workers
from verl.workers.weight_sync import rollout_mode

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "observing.md").read_text(encoding="utf-8")


def _commands(start: str) -> list[list[str]]:
    return [shlex.split(line) for line in re.findall(rf"^    ({start}.*)$", PAGE, flags=re.MULTILINE)]


def test_the_recipe_takes_the_keys(tmp_path: Path) -> None:
    commands = _commands("bash recipes/r1_zero/ray_start_grpo_npu.sh")
    asked = []
    for command in commands:
        settings = read_settings(load_recipe("r1_zero"), command[2:], {"OUTPUT_DIR": str(tmp_path)})
        config = resolve_config(settings)
        assert validate_config(config) == []
        asked.append((config.trainer.timeline_freq, config.trainer.log_samples_freq, config.is_profiled))
    assert {(10, -1, False), (-1, 10, False), (-1, -1, True)} <= set(asked)
    known = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert set(re.findall(r"(?<!verl\.)trainer\.(\w+)", PAGE)) <= known


def test_the_viewer_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        _write(tmp_path / "outputs" / "r1_zero", step, [_record(step, 0)])
    [command] = _commands("python -m tools.viewer")
    assert main(command[3:]) == 0
    assert (tmp_path / "outputs" / "r1_zero" / "samples.html").is_file()
    assert main([*command[3:], "--steps", "10,20"]) == 0
    assert capsys.readouterr().out.count("2 samples") == 2


def test_fields_and_spans_are_those_of_the_code() -> None:
    table = PAGE[PAGE.index("| field | meaning |") :].split("\n\n")[0]
    fields = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(fields) == set(FIELDS) == set(_record(1, 0))
    written = inspect.getsource(SampleRecords)
    assert all(f'"{name}":' in written for name in fields)
    table = PAGE[PAGE.index("| call | parts |") :].split("\n\n")[0]
    code = inspect.getsource(megatron_workers) + inspect.getsource(rollout_mode)
    for name in re.findall(r"`(\w+)`", table):
        if name != "async_save":
            assert f'"{name}"' in code or f"def {name}(" in code, f"no span {name}"
