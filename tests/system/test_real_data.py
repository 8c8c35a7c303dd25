"""Problems as people wrote them, through every recipe: its rows, prompts and reward, two steps of the tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recipes.common.math_answers import true_answer
from recipes.common.recipe import load_recipe
from recipes.dapo_qwen3_moe.arithmetic import published_row
from recipes.dapo_qwen3_moe.dapo_math import FORM
from recipes.math_lighteval.math_lighteval import convert as convert_problems
from recipes.r1_dynamic_sampling import arithmetic as dynamic_sampling
from recipes.r1_dynamic_sampling.prompt_data import convert as convert_prompts
from recipes.r1_zero.json_to_parquet import convert as convert_json
from tests.recipes.test_math_answers import REAL_DATA
from tests.system.command import read_metrics
from tests.system.jobs import SMALL, Job, Prepared

FILES = {"MATH and AIME": ("deepscaler_math_aime.json",), "GSM8K": ("gsm8k_train.jsonl", "gsm8k_test.jsonl")}
HELD_OUT = 256
STEPS = 2
# A model that solves none of them yet gets no gradient from rewards that are all equal.
MOVES = "actor_rollout_ref.actor.entropy_coeff=0.01"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a base model and a run of the whole job


def read_set(name: str) -> list[dict[str, str]]:
    """problem, answer, solution of every row with an answer; skips where the files are not there."""
    missing = [file for file in FILES[name] if not (REAL_DATA / file).is_file()]
    if missing:
        pytest.skip(f"{REAL_DATA} has no {' and no '.join(missing)}: no recipe is trained on {name}")
    texts = [(REAL_DATA / file).read_text(encoding="utf-8") for file in FILES[name]]
    if name == "GSM8K":
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        rows = [{"problem": x["question"], "answer": true_answer(x["answer"]), "solution": x["answer"]} for x in lines]
    else:
        rows = json.loads(texts[0])
    return [row for row in rows if row["answer"] and row["answer"].strip()]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def for_r1_zero(folder: Path, rows: list[dict[str, str]]) -> Prepared:
    """All of them as one list; the recipe holds a tenth out, and leaves out what it finds twice."""
    path = folder / "problems.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    report = convert_json(path, folder / "data")
    assert report is not None and report.skipped == []
    assert report.train_rows + report.test_rows + len(report.duplicates) == len(rows)
    return Prepared(folder, {"JSON_PATH": path})


def for_math_lighteval(folder: Path, rows: list[dict[str, str]]) -> Prepared:
    """A folder of both sides; the form has the answer in a box, which MATH's rows here lack with their solutions."""
    problems = folder / "problems"
    boxed = [{"problem": row["problem"], "solution": f"It is $\\boxed{{{row['answer']}}}$."} for row in rows]
    write_lines(problems / "train.jsonl", boxed[HELD_OUT:])
    write_lines(problems / "test.jsonl", boxed[:HELD_OUT])
    assert convert_problems(problems, folder / "data") == {"train": len(rows) - HELD_OUT, "test": HELD_OUT}
    return Prepared(folder, {"INPUT_DIR": problems}, "math_lighteval")


KEEP = '''"""A model that solves nothing yet has no group whose samples differ."""


def any_group(config, group):
    return True
'''


def for_r1_dynamic_sampling(folder: Path, rows: list[dict[str, str]]) -> Prepared:
    """JSON lines, the last 256 of which the recipe holds out."""
    lines = [{"prompt": row["problem"] + dynamic_sampling.INSTRUCTION, "label": row["answer"]} for row in rows]
    path = write_lines(folder / "prompts.jsonl", lines)
    counts = convert_prompts(path, {}, folder / "data", "prompt", "label", HELD_OUT)
    assert counts == {"train": len(rows) - HELD_OUT, "held_out": HELD_OUT}
    (folder / "filters.py").write_text(KEEP)
    more = ("data.gen_batch_size=8", f"algorithm.filter_groups.filter_path={folder / 'filters.py'}:any_group")
    return Prepared(folder, {"PROMPT_DATA": path}, "r1_dynamic_sampling", (*SMALL, *more))


def for_dapo_qwen3_moe(folder: Path, rows: list[dict[str, str]]) -> Prepared:
    """DAPO's columns and prompt, with some of the problems on the other side."""
    published = [published_row(row["problem"], row["answer"]) for row in rows]
    write_lines(folder / "problems" / "train.jsonl", published[HELD_OUT:])
    write_lines(folder / "problems" / "test.jsonl", published[:HELD_OUT])
    counts = FORM.convert(folder / "problems", folder / "data")
    assert counts == {"train": len(rows) - HELD_OUT, "test": HELD_OUT}
    (folder / "filters.py").write_text(KEEP)
    groups = "algorithm.filter_groups"
    more = ("data.gen_batch_size=8", f"{groups}.metric=null", f"{groups}.filter_path={folder / 'filters.py'}:any_group")
    return Prepared(folder, {"INPUT_DIR": folder / "problems"}, "dapo_qwen3_moe", (*SMALL, *more))


PREPARE: dict[str, Callable[[Path, list[dict[str, str]]], Prepared]] = {
    "r1_zero": for_r1_zero,
    "math_lighteval": for_math_lighteval,
    "r1_dynamic_sampling": for_r1_dynamic_sampling,
    "dapo_qwen3_moe": for_dapo_qwen3_moe,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("recipe", PREPARE)
def test_the_tiny_model_trains_on_real_problems(recipe: str, name: str, tmp_path: Path) -> None:
    """Its tokenizer learns from the problems themselves, and knows every byte; prompts over the limit are left out."""
    rows = read_set(name)
    prepared = PREPARE[recipe](tmp_path, rows)
    table = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    answers = {row["answer"].strip() for row in rows}
    assert len(table) > 6000 and {row["reward_model"]["ground_truth"].strip() for row in table} <= answers
    job = Job(prepared.make_model(load_recipe(recipe).corpus), tmp_path, STEPS, (MOVES,))
    job.finish()
    metrics = read_metrics(job.output_dir)
    assert [record["step"] for record in metrics] == [*range(STEPS + 1)]
    assert all(0 < record["actor/grad_norm"] < math.inf for record in metrics[1:])
    problems = {row["problem"].strip() for row in rows}
    for step in range(1, STEPS + 1):
        lines = (job.output_dir / "reward_ledger" / f"step_{step}.jsonl").read_text().splitlines()
        graded = [json.loads(line) for line in lines]
        assert len(graded) == 8 * 4 and all(line["status"] == "ok" for line in graded)
        assert all(line["grader"]["path"] == str(load_recipe(recipe).reward_path) for line in graded)
        assert {line["ground_truth"].strip() for line in graded} <= answers
        assert all(any(problem in line["prompt"] for problem in problems) for line in graded), "spelt as it was written"
