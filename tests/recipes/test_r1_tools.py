"""The recipe with tools: its problems, the corpus of its tiny model, and its reward."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from recipes.common.recipe import load_recipe
from recipes.r1_tools import problems
from recipes.r1_tools.r1_tools import INSTRUCTION, main
from recipes.r1_tools.recipe import examples_of
from recipes.r1_tools.reward import PRICE, compute_score
from verl.tools.calculator import computed

RECIPE = load_recipe("r1_tools")


def _rows(tmp_path: Path) -> list[dict[str, Any]]:
    problems.write_set(tmp_path / "problems", 300, 1)
    assert main(["--input_dir", str(tmp_path / "problems"), "--output_dir", str(tmp_path / "data")]) == 0
    assert pq.read_table(tmp_path / "data" / "test.parquet").num_rows == 30
    return pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()


def test_every_problem_has_a_call_that_solves_it(tmp_path: Path) -> None:
    kinds = {"hard": 0, "easy": 0}
    for row in _rows(tmp_path):
        call, truth = json.loads(row["extra_info"]["call"]), row["reward_model"]["ground_truth"]
        kinds[row["extra_info"]["kind"]] += 1
        if call["name"] == "calculator":
            assert str(computed(call["arguments"]["expression"])) == truth
        else:
            text, _, digit = (
                call["arguments"]["code"].removeprefix("print('").removesuffix("'))").partition("'.count('")
            )
            assert str(text.count(digit)) == truth
    assert 0.4 < kinds["easy"] / sum(kinds.values()) < 0.6


def test_the_corpus_calls_as_often_on_both_kinds_and_errs(tmp_path: Path) -> None:
    generator, calls, right = random.Random(3), {"hard": [], "easy": []}, []
    for row in _rows(tmp_path) * 4:
        made = examples_of(row, row["reward_model"]["ground_truth"], generator)
        calls[row["extra_info"]["kind"]].append(len(made) > 1)
        assert made[0].messages == row["prompt"] and made[0].messages[-1]["content"].endswith(INSTRUCTION)
        if len(made) > 1:
            assert [message["role"] for message in made[1].messages] == ["user", "assistant", "tool"]
            text = made[0].response.partition("<tool_call>")[2].removesuffix("</tool_call>")
            right.append(json.loads(text) == json.loads(row["extra_info"]["call"]))
    shares = {kind: sum(found) / len(found) for kind, found in calls.items()}
    assert abs(shares["hard"] - shares["easy"]) < 0.1
    assert 0.5 < sum(right) / len(right) < 0.8


def test_the_reward_knows_answers_and_calls_and_no_kind() -> None:
    for kind in ("hard", "easy"):
        info = {"kind": kind, "tool_calls": 1.0}
        found = compute_score("", "a call\n#### 42", "42", info)
        assert found == {"score": 1 - PRICE, "accuracy": 1.0, "calls": 1.0, f"tool_on_{kind}": 1.0}
        assert compute_score("", "#### 42", "42", {"kind": kind})["score"] == 1.0
        assert compute_score("", "42", "42", info)["score"] == -PRICE
        assert compute_score("", "#### 43", "42", {"kind": kind})["score"] == 0.0
