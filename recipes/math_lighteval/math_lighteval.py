"""From MATH-lighteval (problem, level, type, solution; parquet or JSON lines) to verl's train and test parquet.

GSM8K's rows (question, answer ending in ``#### n``) are read as well.
"""

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

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."
GSM8K = "openai/gsm8k"
# data source -> its columns of the problem and of the worked solution; the first one that fits a row applies
FORMS = {DATA_SOURCE: ("problem", "solution"), GSM8K: ("question", "answer")}
CARRIED = ("level", "type")  # where a row has them
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def converted_row(row: Any, side: str, index: int) -> dict[str, Any] | str:
    """The row in verl's schema, ``index`` its place in its side; or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object with problem and solution"
    data_source = GSM8K if FORMS[GSM8K][0] in row else DATA_SOURCE
    problem, solution = FORMS[data_source]
    for name in (problem, solution):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"{name} is {'missing' if name not in row else 'empty or no text'}"
    answer = true_answer(row[solution])
    if answer is None:
        return f"its {solution} has no final answer: expected a \\boxed{{...}} that is closed and not empty, or ####"
    carried = {name: None if row.get(name) is None else str(row[name]) for name in CARRIED}
    prompt = [{"role": "user", "content": row[problem] + INSTRUCTION}]
    return data_scripts.verl_row(data_source, prompt, answer, side, index) | carried


FORM = QuestionForm(
    name="MATH-lighteval",
    columns=tuple(FORMS.values()),
    converted_row=converted_row,
    settings={"form": FORM_VERSION, "instruction": INSTRUCTION},
    carried=CARRIED,
)
convert, input_files = FORM.convert, FORM.input_files
main = partial(FORM.main, __doc__, "~/data/math")


if __name__ == "__main__":
    sys.exit(main())
