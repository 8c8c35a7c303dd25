"""Records of what was made: they hold as long as nothing that it was made from has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tools.launch import first_plan
from tools.launch.job import Job, resolve_config
from tools.launch.records import FILE, Records, code_digest, files_of
from tools.launch.settings import read_settings


def test_a_record_is_found_by_everything_that_it_was_made_from(tmp_path: Path) -> None:
    Records(tmp_path).write("data", True, ["command", "--seed", "1"], [("file", 3, 4)])
    assert Records(tmp_path).find("data", ["command", "--seed", "1"], [("file", 3, 4)]) is True
    assert Records(tmp_path).find("data", ["command", "--seed", "2"], [("file", 3, 4)]) is None
    assert Records(tmp_path).find("data", ["command", "--seed", "1"], [("file", 3, 5)]) is None
    assert Records(tmp_path).find("other", ["command", "--seed", "1"], [("file", 3, 4)]) is None
    later = Records(tmp_path)
    later.code = "of another version"
    assert later.find("data", ["command", "--seed", "1"], [("file", 3, 4)]) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"data": 1}', '{"data": {"digest": 1}}'])
def test_a_damaged_file_has_no_record_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    assert Records(tmp_path).find("data", "it") is None
    Records(tmp_path).write("data", True, "it")
    assert Records(tmp_path).find("data", "it") is True


def test_files_are_those_that_a_command_names_and_those_in_its_folders(tmp_path: Path) -> None:
    folder, file = tmp_path / "made", tmp_path / "input.json"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "weights").write_bytes(b"1234")
    file.write_text("[]", encoding="utf-8")
    command = ["python", "-m", "module", "--seed", "42", "--input", str(file), "--output", str(folder)]
    before = files_of(command)
    assert [(Path(path).name, size) for path, size, _ in before] == [("input.json", 2), ("weights", 4)]
    os.utime(file, ns=(1, 1))
    assert files_of(command) != before
    (folder / "inner" / "weights").unlink()
    assert len(files_of(command)) == 1


def test_the_code_is_that_of_the_packages_without_tests(tmp_path: Path) -> None:
    for package in ("engine", "tests"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("", encoding="utf-8")
    before = code_digest(tmp_path)
    (tmp_path / "tests" / "test_it.py").write_text("1", encoding="utf-8")
    (tmp_path / "engine" / "notes.md").write_text("1", encoding="utf-8")
    assert code_digest(tmp_path) == before
    (tmp_path / "engine" / "config.yaml").write_text("1", encoding="utf-8")
    assert code_digest(tmp_path) != before


def test_a_plan_that_fits_is_kept_and_another_run_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner itself is not run: how often it would be is what is looked at."""
    planned: list[list[str]] = []

    def planner(command: list[str], result: Path, timeout_s: float) -> list[str]:
        planned.append(command)
        result.write_text('{"problems": []}', encoding="utf-8")
        return ["plan: fits"]

    monkeypatch.setattr(first_plan, "run_planner", planner)

    def plan(*overrides: str) -> str:
        environment = {"OUTPUT_DIR": str(tmp_path), "CONFIG_NAME": "r1_zero_tiny"}
        settings = read_settings(load_recipe("r1_zero"), overrides, environment)
        return first_plan.first_plan(Job(settings, resolve_config(settings)), records=Records(tmp_path)).summary

    assert plan() == plan() == "plan: fits"
    assert len(planned) == 1
    assert plan("trainer.n_gpus_per_node=1") == "plan: fits"
    assert len(planned) == 2
