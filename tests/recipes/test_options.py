"""Every data script takes the same names for the same thing, and names what it does not take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from recipes.common import arithmetic
from recipes.common.options import INPUT, OUTPUT
from recipes.dapo_qwen3_moe import arithmetic as dapo_arithmetic
from recipes.dapo_qwen3_moe import dapo_math
from recipes.gsm8k import gsm8k, word_problems
from recipes.math_lighteval import arithmetic as math_arithmetic
from recipes.math_lighteval import math_lighteval
from recipes.r1_dynamic_sampling import arithmetic as dynamic_arithmetic
from recipes.r1_dynamic_sampling import prompt_data
from recipes.r1_zero import json_to_parquet

Main = Callable[[list[str]], int]
# The commands that make problems, and what reads what they make: the recipe's data script and its input option.
PROBLEMS: dict[str, Main] = {
    "r1_zero": lambda argv: arithmetic.generate("", argv=argv),
    "gsm8k": lambda argv: arithmetic.generate("", word_problems.write_set, argv),
    "math_lighteval": lambda argv: arithmetic.generate("", math_arithmetic.write_set, argv),
    "dapo_qwen3_moe": lambda argv: arithmetic.generate("", dapo_arithmetic.write_set, argv),
    "r1_dynamic_sampling": lambda argv: arithmetic.generate("", dynamic_arithmetic.write_set, argv),
}
DATA: dict[str, tuple[Main, str, str]] = {
    "r1_zero": (json_to_parquet.main, "--json_path", "deepscaler.json"),
    "gsm8k": (partial(gsm8k.main), "--input_dir", ""),
    "math_lighteval": (partial(math_lighteval.main), "--input_dir", ""),
    "dapo_qwen3_moe": (partial(dapo_math.main), "--input_dir", ""),
    "r1_dynamic_sampling": (
        lambda argv: prompt_data.main([*argv, "--held-out", "3"]),
        "--prompt_data",
        "prompts.jsonl",
    ),
}
COMMANDS: dict[str, Main] = {f"{name} problems": main for name, main in PROBLEMS.items()} | {
    f"{name} data": main for name, (main, *_) in DATA.items()
}


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_both_commands_of_a_recipe_take_every_name_of_the_folder(name: str, tmp_path: Path) -> None:
    hyphened = [option.replace("_", "-") for option in OUTPUT]
    main, given, inner = DATA[name]
    (tmp_path / "made").mkdir()
    for option, count in zip((*OUTPUT, *hyphened), ("--num_problems", "--num-problems") * 4, strict=True):
        assert PROBLEMS[name]([option, str(tmp_path / "made"), count, "30"]) == 0
    inputs = INPUT if given in INPUT else (given,)
    for number, option in enumerate((*OUTPUT, *hyphened)):
        out = tmp_path / f"out{number}"
        source = inputs[number % len(inputs)]
        assert main([source, str(tmp_path / "made" / inner), option, str(out)]) == 0
        assert (out / "train.parquet").is_file()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_what_is_no_option_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--output_dir", "x", "--input_dir", "y", "--prompt_data", "z"]
    for argument, told in (
        ("--outptu_dir=a", "--outptu_dir is no option of this command: did you mean --output_dir?"),
        ("--hdfs-dir", "--hdfs-dir is no option of this command: this command writes to a local folder alone"),
        ("--zzz", "--zzz is no option of this command: there are --"),
        ("--out", "--out is no option of this command"),
    ):
        with pytest.raises(SystemExit) as ended:
            COMMANDS[command]([*_taken(command, needed), argument])
        assert ended.value.code == 2 and told in " ".join(capsys.readouterr().err.split())


def _taken(command: str, needed: list[str]) -> list[str]:
    """Those of ``needed`` that the command has to have."""
    name, kind = command.split()
    option = DATA[name][1] if kind == "data" else "--output_dir"
    return needed[:2] + (needed[needed.index(option) :][:2] if option in needed[2:] else [])


def test_two_names_of_the_folder_with_two_values_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        PROBLEMS["gsm8k"](["--output_dir", "a", "--local_dir", "b"])
    assert "--output_dir a and --local_dir b name the same folder; give one of them" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        PROBLEMS["gsm8k"]([])
    assert "--output_dir" in capsys.readouterr().err
    same = ["--output_dir", str(tmp_path), "--local_dir", str(tmp_path), "--num_problems", "30"]
    assert PROBLEMS["gsm8k"](same) == 0


def test_a_tilde_is_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PROBLEMS["r1_zero"](["--output", "~/data/made.json", "--num_problems", "30"]) == 0
    assert json_to_parquet.main(["--json_path", "~/data/made.json", "--output_dir", "~/data"]) == 0
    assert (tmp_path / "data" / "train.parquet").is_file()
