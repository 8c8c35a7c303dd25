"""Command: the shared arithmetic problems as rows of DAPO-Math-17k and AIME-2024, for a run without a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.common.arithmetic import generate, make_set, write_sides

BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
DATA_SOURCE = "math_dapo"


def published_row(problem: str, answer: str) -> dict[str, Any]:
    """A problem in the published files' columns and prompt."""
    prompt = [{"role": "user", "content": BEFORE + problem + AFTER}]
    return {"data_source": DATA_SOURCE, "prompt": prompt, "reward_model": {"ground_truth": answer}}


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
    """``train.jsonl`` and ``test.jsonl``; the same files for the same seed."""
    rows = [published_row(item["problem"], item["answer"]) for item in make_set(num_problems, seed)]
    write_sides(output_dir, rows)
    return [f"wrote {num_problems} arithmetic problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
