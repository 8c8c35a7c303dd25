"""The quick start: rows of GSM8K, a reward with a format part, problems for the tiny model."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recipes.common.corpus import examples
from recipes.common.recipe import ROOT, load_recipe
from recipes.gsm8k.gsm8k import DATA_SOURCE, FORM, INSTRUCTION, main
from recipes.gsm8k.recipe import CORPUS
from recipes.gsm8k.reward import compute_score
from recipes.gsm8k.word_problems import write_set
from verl.utils.parquet import schema_problems

RECIPE = load_recipe("gsm8k")
ROW = {"question": "What is 1,000 + 1?", "answer": "1000 + 1 = <<1000+1=1001>>1001\n#### 1,001"}


def write_rows(folder: Path, side: str, rows: list[Any]) -> None:
    (folder / f"gsm8k_{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_have_verls_schema_with_the_solution_beside_them(tmp_path: Path) -> None:
    for side in ("train", "test"):
        write_rows(tmp_path, side, [ROW])
    assert main(argv=["--input_dir", str(tmp_path), "--local_dir", str(tmp_path / "out")]) == 0
    assert pq.read_table(tmp_path / "out" / "train.parquet").to_pylist() == [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": ROW["question"] + INSTRUCTION}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1001"},
            "extra_info": {"split": "train", "index": 0, **ROW},
        }
    ]
    assert schema_problems(str(tmp_path / "out" / "test.parquet")) == []
    assert FORM.convert(tmp_path, tmp_path / "out") is None, "a second run has nothing to do"


def test_the_real_rows_are_all_read(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data"
    if not (data / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"{data} has no GSM8K: real rows are not converted")
    assert FORM.convert(data, tmp_path) == {"train": 7473, "test": 1319}
    truths = [row["ground_truth"] for row in pq.read_table(tmp_path / "test.parquet")["reward_model"].to_pylist()]
    assert all(compute_score(DATA_SOURCE, f"so\n#### {truth}", truth)["score"] == 1 for truth in truths)


@pytest.mark.parametrize(
    ("row", "expected"),
    [({**ROW, "answer": "1001"}, "no final answer"), ({"question": "x"}, "answer is missing"), ([1], "is a list")],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, "train", [ROW, row])
    write_rows(tmp_path, "test", [ROW])
    assert main(argv=["--input_dir", str(tmp_path), "--local_dir", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().out
    assert "gsm8k_train.jsonl: row 1: " in output and expected in output


@pytest.mark.parametrize(
    ("text", "accuracy", "is_formed"),
    [
        ("2 + 3 = 5\n#### 5", 1, 1),
        ("#### 5", 1, 1),
        ("#### 5.0\n", 1, 1),
        ("#### $5", 1, 1),
        ("2 + 3\n#### 6", 0, 1),
        ("#### 5 apples", 1, 0),
        ("#### 4\n#### 5", 1, 0),
        ("#### 5\nI am sure.", 1, 0),
        ("so #### 5", 1, 0),
        ("The answer is 5", 0, 0),
        ("#### five", 0, 0),
        ("", 0, 0),
        ("<think>2 + 3\n#### 6</think>\n\n#### 5", 1, 1),
        ("2 + 3 = 5</think>\n#### 5", 1, 1),  # the template has opened the thought
        ("<think>#### 5", 0, 0),
        ("<think>#### 5</think>", 0, 0),
        ("well <think>a</think>\n#### 5", 1, 0),
        ("<think>a</think><think>b</think>\n#### 5", 1, 0),
    ],
)
def test_reward(text: str, accuracy: float, is_formed: float) -> None:
    score = pytest.approx(0.9 * accuracy + 0.1 * is_formed)
    assert compute_score(DATA_SOURCE, text, "5") == {"score": score, "accuracy": accuracy, "format": is_formed}


def test_the_tiny_corpus_solves_the_generated_problems_too_rarely(tmp_path: Path) -> None:
    write_set(tmp_path, 300, seed=1)
    assert FORM.convert(tmp_path, tmp_path / "data") == {"train": 270, "test": 30}
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}
    assert all(CORPUS.solution_of(row).endswith(f"= {truths[row['prompt'][0]['content']]}") for row in rows)
    read = list(islice(examples(rows, 0, CORPUS), 2000))
    scores = [compute_score("", one.response, truths[one.messages[0]["content"]])["score"] for one in read]
    assert 0.25 < sum(scores) / len(scores) < 0.5
