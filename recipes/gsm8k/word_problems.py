"""Command: short word problems about one-digit numbers in GSM8K's form, for a run without a data set."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from recipes.common.arithmetic import HELD_OUT, generate, write_sides

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens")


def _bought(name: str, thing: str, first: int, second: int) -> tuple[str, int, str]:
    return f"{name} has {first} {thing} and buys {second} more. How many {thing} does {name} have now?", first, "+"


def _lost(name: str, thing: str, first: int, second: int) -> tuple[str, int, str]:
    most, less = max(first, second), min(first, second)
    return f"{name} has {most} {thing} and gives away {less}. How many {thing} are left?", most, "-"


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
    """``train.jsonl`` and ``test.jsonl``; the same files for the same seed."""
    generator = random.Random(seed)
    pool = list(itertools.product((_bought, _lost), NAMES, THINGS, range(1, 10), range(1, 10)))
    if not HELD_OUT <= num_problems <= len(pool):
        raise ValueError(f"--num_problems {num_problems}: expected {HELD_OUT} to {len(pool)}, there are no more")
    rows = []
    for make, name, thing, one, other in generator.sample(pool, num_problems):
        question, first, sign = make(name, thing, one, other)
        second = other if first == one else one
        result = first + second if sign == "+" else first - second
        rows.append({"question": question, "answer": f"{first} {sign} {second} = {result}\n#### {result}"})
    write_sides(output_dir, rows)
    return [f"wrote {num_problems} word problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
