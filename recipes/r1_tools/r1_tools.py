"""From problems (question, answer, kind, and a call that solves it; JSON lines or parquet) to verl's parquet."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.common import data_scripts
from recipes.common.two_sides import QuestionForm

DATA_SOURCE = "r1_tools"
INSTRUCTION = ' Call a tool where you need one. Give the final answer after "####".'
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def converted_row(row: Any, side: str, index: int) -> dict[str, Any] | str:
    """The row in verl's schema, or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object with question and answer"
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"{name} is {'missing' if name not in row else 'empty or no text'}"
    prompt = [{"role": "user", "content": row["question"] + INSTRUCTION}]
    converted = data_scripts.verl_row(DATA_SOURCE, prompt, row["answer"].strip(), side, index)
    converted["extra_info"] |= {"kind": str(row.get("kind", "")), "call": json.dumps(row.get("call"))}
    return converted


FORM = QuestionForm(
    name="problems for tools",
    columns=(("question", "answer"),),
    converted_row=converted_row,
    settings={"form": FORM_VERSION, "instruction": INSTRUCTION},
    extra_texts=("kind", "call"),
)
main = partial(FORM.main, __doc__, "~/data/r1_tools")


if __name__ == "__main__":
    sys.exit(main())
