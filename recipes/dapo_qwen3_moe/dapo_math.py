"""From DAPO-Math-17k and AIME-2024 (verl's columns; parquet or JSON lines) to train and test parquet."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.common import data_scripts
from recipes.common.two_sides import QuestionForm

COLUMNS = ("prompt", "reward_model")
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def converted_row(row: Any, side: str, index: int) -> dict[str, Any] | str:
    """The row with its source, prompt and answer as they are; or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object with {' and '.join(COLUMNS)}"
    source, model = row.get("data_source"), row.get("reward_model")
    if not isinstance(source, str) or not source:
        return f"data_source is {source!r}; expected a text such as math_dapo"
    chat = data_scripts.messages(row.get("prompt"))
    if chat is None:
        return f"prompt is {str(row.get('prompt'))[:60]!r}; expected messages of role and content"
    answer = model.get("ground_truth") if isinstance(model, dict) else None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        return f"reward_model is {str(model)[:60]!r}; expected the answer as its ground_truth"
    return data_scripts.verl_row(source, chat, str(answer), side, index)


FORM = QuestionForm(
    name="DAPO-Math-17k and AIME-2024",
    columns=(COLUMNS,),
    converted_row=converted_row,
    settings={"form": FORM_VERSION},
    published={"train": "dapo-math-17k", "test": "aime-2024"},
)
main = partial(FORM.main, __doc__, "~/data/dapo")


if __name__ == "__main__":
    sys.exit(main())
