"""From GSM8K (question, and answer that ends in ``#### n``; parquet or JSON lines) to verl's train and test parquet."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.common import data_scripts
from recipes.common.math_answers import true_answer
from recipes.common.two_sides import QuestionForm
from recipes.gsm8k import degrees

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = ' Let\'s think step by step and output the final answer after "####".'
COLUMNS = ("question", "answer")
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def converted_row(row: Any, side: str, index: int) -> dict[str, Any] | str:
    """The row in verl's schema with the worked solution in its extra_info; or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object with question and answer"
    for name in COLUMNS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"{name} is {'missing' if name not in row else 'empty or no text'}"
    if "####" not in row["answer"] or (answer := true_answer(row["answer"])) is None:
        return "its answer has no final answer: expected a last line #### n"
    prompt = [{"role": "user", "content": row["question"] + INSTRUCTION}]
    converted = data_scripts.verl_row(DATA_SOURCE, prompt, answer.replace(",", ""), side, index)
    converted["extra_info"] |= {"question": row["question"], "answer": row["answer"]}
    return converted


def solution_of(row: dict[str, Any]) -> str:
    """The worked solution of a converted row, without the line of its answer."""
    answer: str = row["extra_info"]["answer"]
    return answer.rpartition("\n####")[0]


FORM = QuestionForm(
    name="GSM8K",
    columns=(COLUMNS,),
    converted_row=converted_row,
    settings={"form": FORM_VERSION, "instruction": INSTRUCTION},
    extra_texts=COLUMNS,
)
main = partial(degrees.main, FORM, __doc__, "~/data/gsm8k")


if __name__ == "__main__":
    sys.exit(main())
