"""Command: problems that are too hard to do in the head, and easy ones, in the form that ``r1_tools`` reads."""

from __future__ import annotations

import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from recipes.common.arithmetic import generate, write_sides

HARD, EASY = "hard", "easy"


def product(generator: random.Random) -> dict[str, Any]:
    first, second = generator.randint(100, 999), generator.randint(11, 99)
    call = {"name": "calculator", "arguments": {"expression": f"{first} * {second}"}}
    return {"question": f"What is {first} * {second}?", "answer": str(first * second), "kind": HARD, "call": call}


def count(generator: random.Random) -> dict[str, Any]:
    """How often a digit is in a row of twelve, with a third of them that digit."""
    digit = generator.choice("0123456789")
    row = "".join(generator.choice(digit * 5 + "0123456789") for _ in range(12))
    call = {"name": "python", "arguments": {"code": f"print('{row}'.count('{digit}'))"}}
    return {"question": f"How many {digit} are in {row}?", "answer": str(row.count(digit)), "kind": HARD, "call": call}


def later_date(generator: random.Random) -> dict[str, Any]:
    day, count = date(2000, 1, 1) + timedelta(generator.randrange(36525)), generator.randint(100, 999)
    code = f"from datetime import date, timedelta; print(date.fromisoformat('{day}') + timedelta({count}))"
    question, answer = f"Which date is {count} days after {day}?", str(day + timedelta(count))
    return {
        "question": question,
        "answer": answer,
        "kind": HARD,
        "call": {"name": "python", "arguments": {"code": code}},
    }


def easy_sum(generator: random.Random) -> dict[str, Any]:
    first, second = generator.randint(0, 9), generator.randint(0, 9)
    call = {"name": "calculator", "arguments": {"expression": f"{first} + {second}"}}
    return {"question": f"What is {first} + {second}?", "answer": str(first + second), "kind": EASY, "call": call}


_EASY = (easy_sum, easy_sum, easy_sum, easy_sum)
_MIX = (product, product, product, count, *_EASY)
_MIX_WITH_DATES = (product, product, count, later_date, *_EASY)


def make_set(num_problems: int, seed: int, has_dates: bool = False) -> list[dict[str, Any]]:
    """Half of them easy, an eighth counts and, if wanted, an eighth dates; a hard question comes once."""
    generator, found, asked = random.Random(seed), list[dict[str, Any]](), set[str]()
    while len(found) < num_problems:
        made = generator.choice(_MIX_WITH_DATES if has_dates else _MIX)(generator)
        if made["kind"] == EASY or made["question"] not in asked:
            asked.add(made["question"])
            found.append(made)
    return found


def write_set(output_dir: Path, num_problems: int, seed: int, has_dates: bool = False) -> list[str]:
    """``train.jsonl`` and ``test.jsonl``; the same files for the same seed."""
    write_sides(output_dir, make_set(num_problems, seed, has_dates))
    return [f"wrote {num_problems} problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set, switch=("--dates", "dates too, which the tiny model cannot copy")))
