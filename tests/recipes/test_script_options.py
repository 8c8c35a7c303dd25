"""Every data script takes its options in both spellings, and the output's folder under every name of it."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import pytest

from recipes.common.arithmetic import generate
from recipes.common.data_scripts import add_option, add_output
from recipes.gsm8k.gsm8k import main as gsm8k
from recipes.gsm8k.word_problems import write_set
from recipes.r1_dynamic_sampling.prompt_data import main as prompt_data
from recipes.r1_zero.json_to_parquet import main as json_to_parquet

OUTPUTS = ["--output", *(f"--{a}{s}{b}" for a, b in (("output", "dir"), ("local", "dir")) for s in "_-")]
OUTPUTS += ["--local_save_dir", "--local-save-dir"]


@pytest.mark.parametrize("option", OUTPUTS)
def test_the_output_has_every_name_in_every_script(tmp_path: Path, option: str) -> None:
    words, sums, lines = tmp_path / "words", tmp_path / "sums.json", tmp_path / "lines.jsonl"
    assert generate(None, write_set, [option, str(words), "--num-problems", "60", "--seed", "1"]) == 0
    assert gsm8k(["--input-dir", str(words), option, str(tmp_path / "gsm8k")]) == 0
    assert generate(None, argv=[option, str(sums), "--num_problems", "40"]) == 0
    assert json_to_parquet(["--json-path", str(sums), option, str(tmp_path / "r1"), "--train-data-ratio", "0.5"]) == 0
    lines.write_text("".join(json.dumps({"prompt": f"{i} + 1", "label": str(i + 1)}) + "\n" for i in range(20)))
    assert prompt_data(["--prompt-data", str(lines), option, str(tmp_path / "dapo"), "--held-out", "4"]) == 0
    assert all((tmp_path / name / "train.parquet").is_file() for name in ("gsm8k", "r1", "dapo"))


def test_the_command_itself_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["word_problems", "--output_dir", str(tmp_path / "w"), "--num_problems", "60"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipes.gsm8k.word_problems", run_name="__main__")
    assert ended.value.code == 0 and (tmp_path / "w" / "train.jsonl").is_file()


def test_an_option_has_its_first_name_as_destination() -> None:
    parser = argparse.ArgumentParser()
    add_option(parser, "num_steps", type=int)
    add_output(parser, "local_dir")
    assert vars(parser.parse_args(["--num-steps", "3", "--output", "x"])) == {"num_steps": 3, "local_dir": Path("x")}
