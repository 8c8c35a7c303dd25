"""Command: problems that are too hard to do in the head, and easy ones, in the form that ``r1_tools`` reads."""

from __future__ import annotations

import random
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


def easy_sum(generator: random.Random) -> dict[str, Any]:
    first, second = generator.randint(0, 9), generator.randint(0, 9)
    call = {"name": "calculator", "arguments": {"expression": f"{first} + {second}"}}
    return {"question": f"What is {first} + {second}?", "answer": str(first + second), "kind": EASY, "call": call}


_MIX = (product, product, product, count, easy_sum, easy_sum, easy_sum, easy_sum)


def make_set(num_problems: int, seed: int) -> list[dict[str, Any]]:
    """Half of them easy, and an eighth counts; a hard question comes once."""
    generator, found, asked = random.Random(seed), list[dict[str, Any]](), set[str]()
    while len(found) < num_problems:
        made = generator.choice(_MIX)(generator)
        if made["kind"] == EASY or made["question"] not in asked:
            asked.add(made["question"])
            found.append(made)
    return found


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
    """``train.jsonl`` and ``test.jsonl``; the same files for the same seed."""
    write_sides(output_dir, make_set(num_problems, seed))
    return [f"wrote {num_problems} problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
