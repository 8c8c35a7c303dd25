"""Command: short word problems about one-digit numbers in GSM8K's form, for a run without a data set.

These are the problems of the first degree. The next degrees have two steps, then larger numbers.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from recipes.common.arithmetic import HELD_OUT, generate, write_sides

NUM_PROBLEMS = 3000  # of each degree

NAMES = ("Ann", "Ben", "Mia", "Tom")
THINGS = ("apples", "books", "coins", "eggs", "pens")


def _bought(name: str, thing: str, first: int, second: int) -> tuple[str, int, str]:
    return f"{name} has {first} {thing} and buys {second} more. How many {thing} does {name} have now?", first, "+"


def _lost(name: str, thing: str, first: int, second: int) -> tuple[str, int, str]:
    most, less = max(first, second), min(first, second)
    return f"{name} has {most} {thing} and gives away {less}. How many {thing} are left?", most, "-"


def _one_step_rows(num_problems: int, seed: int) -> list[dict[str, str]]:
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
    return rows


def _two_steps(generator: random.Random) -> dict[str, str]:
    return _problem(generator, [generator.randint(1, 9) for _ in range(3)])


def _larger_numbers(generator: random.Random) -> dict[str, str]:
    """One step with numbers of two or three digits."""
    return _problem(generator, [generator.randint(*generator.choice(((10, 99), (100, 999)))) for _ in range(2)])


def _problem(generator: random.Random, numbers: list[int]) -> dict[str, str]:
    """A problem that starts with the first number; each further one is added or, where it is no larger, taken away."""
    name, thing, total = generator.choice(NAMES), generator.choice(THINGS), numbers[0]
    clauses, steps = [f"{name} has {total} {thing}"], []
    for number in numbers[1:]:
        is_gain = number > total or generator.random() < 0.5
        result = total + number if is_gain else total - number
        clauses.append(f"buys {number} more" if is_gain else f"gives away {number}")
        steps.append(f"{total} {'+' if is_gain else '-'} {number} = {result}")
        total = result
    told = f"{', '.join(clauses[:-1])} and {clauses[-1]}"
    question = f"{told}. How many {thing} does {name} have now?"
    return {"question": question, "answer": "\n".join([*steps, f"#### {total}"])}


_LATER_DEGREES = {2: _two_steps, 3: _larger_numbers}
GENERATED = (1, *_LATER_DEGREES)  # degrees


def problem_sides(degree: int, seed: int, num_problems: int = NUM_PROBLEMS) -> dict[str, list[dict[str, str]]]:
    """``train`` and ``test`` problems of a degree, each with ``question`` and ``answer``; no question is in both.

    The first degree's test side is that of ``write_set``. Two of its draws may be one question (4 taken from 7), so the
    training side has such a question once, or not at all where it is in the test side.
    """
    if degree == 1:
        rows = _one_step_rows(num_problems, seed)
    else:
        generator, found = random.Random(f"{seed} {degree}"), dict[str, dict[str, str]]()
        while len(found) < num_problems:
            row = _LATER_DEGREES[degree](generator)
            found[row["question"]] = row
        rows = list(found.values())
    count = num_problems // HELD_OUT
    tested = {row["question"] for row in rows[:count]}
    train = {row["question"]: row for row in rows[count:] if row["question"] not in tested}
    return {"train": list(train.values()), "test": rows[:count]}


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
    """``train.jsonl`` and ``test.jsonl`` of the first degree; the same files for the same seed."""
    write_sides(output_dir, _one_step_rows(num_problems, seed))
    return [f"wrote {num_problems} word problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
