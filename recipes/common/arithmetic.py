"""The default problem set: sums, maxima and minima of one-digit integers in ``deepscaler.json``'s form."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_formats.files import write_text
from recipes.common.data_scripts import run_data_script
from recipes.common.options import DataScriptParser

KINDS = ("sum", "maximum", "minimum")
HELD_OUT = 10  # one problem in so many is held out, where a recipe's form of the set has a test side


def make_problem(kind: str, numbers: tuple[int, ...]) -> dict[str, str]:
    """One problem about the numbers, with its answer and a solution that ends in ``= <answer>``.

    A sum is worked out from left to right, ``3 + 7 = 10, 10 + 2 = 12``: steps that a very small model can learn.
    """
    if kind == "sum":
        totals = list(itertools.accumulate(numbers))
        steps = [f"{total} + {number} = {total + number}" for total, number in zip(totals, numbers[1:], strict=False)]
        problem = f"What is {' + '.join(map(str, numbers))}?"
        return {"problem": problem, "answer": str(totals[-1]), "solution": ", ".join(steps)}
    word, function = ("largest", max) if kind == "maximum" else ("smallest", min)
    answer = str(function(numbers))
    return {
        "problem": f"What is the {word} of {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}?",
        "answer": answer,
        "solution": f"{function.__name__}({', '.join(map(str, numbers))}) = {answer}",
    }


def solution_of(problem: str) -> str:
    """The worked solution of a problem of ``make_problem``; an empty text for any other."""
    numbers = tuple(int(number) for number in re.findall(r"\d{1,9}", problem))
    made = [make_problem(kind, numbers) for kind in KINDS] if len(numbers) > 1 else []
    return next((item["solution"] for item in made if item["problem"] == problem), "")


def make_set(num_problems: int = 3000, seed: int = 42) -> list[dict[str, str]]:
    """``num_problems`` different problems, the kinds evenly mixed, in an order and choice that the seed decides."""
    generator = random.Random(seed)
    chosen: list[dict[str, str]] = []
    for position, kind in enumerate(KINDS):
        lengths = (2, 3) if kind == "sum" else (3, 4)
        pool = [numbers for length in lengths for numbers in itertools.product(range(10), repeat=length)]
        wanted = (num_problems + position) // len(KINDS)
        if not 0 < wanted <= len(pool):
            raise ValueError(f"--num_problems {num_problems}: expected 3 to 3300, there are no more different sums")
        chosen += [make_problem(kind, numbers) for numbers in generator.sample(pool, wanted)]
    generator.shuffle(chosen)
    return chosen


def solution_of_row(row: dict[str, Any], instruction: str) -> str:
    """``solution_of`` a verl row whose only message is a problem and ``instruction``: such rows carry no solution."""
    problem: str = row["prompt"][0]["content"]
    return solution_of(problem.removesuffix(instruction))


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One row a line, atomically."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_sides(output_dir: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The first rows as ``test.jsonl``, the others as ``train.jsonl``."""
    count = len(rows) // HELD_OUT
    write_json_lines(output_dir / "test.jsonl", rows[:count])
    write_json_lines(output_dir / "train.jsonl", rows[count:])


def write_json(output: Path, num_problems: int, seed: int) -> list[str] | None:
    """Write the set as a JSON list, in a folder as ``deepscaler.json``, unless the same file is there."""
    output = output / "deepscaler.json" if output.is_dir() else output
    text = json.dumps(make_set(num_problems, seed), indent=1) + "\n"
    if output.is_file() and output.read_text(encoding="utf-8") == text:
        return None
    write_text(output, text)
    return [f"wrote {num_problems} arithmetic problems to {output}"]


def generate(
    description: str | None,
    write: Callable[..., list[str] | None] = write_json,
    argv: list[str] | None = None,
    switch: tuple[str, str] | None = None,
) -> int:
    """The command line of a recipe's form of the problems: ``write(output, num_problems, seed)``, and whether its
    ``switch`` (name, help) is given, where it has one.
    """
    parser = DataScriptParser(description)
    parser.add_output("the file or folder to write")
    parser.add_argument("--num_problems", type=int, default=3000, help="how many (default: 3000)")
    parser.add_argument("--seed", type=int, default=42, help="of the choice and the order (default: 42)")
    if switch is not None:
        parser.add_argument(switch[0], action="store_true", dest="is_on", help=switch[1])
    args = parser.parse_args(argv)
    asked = (args.num_problems, args.seed, *(() if switch is None else (args.is_on,)))
    return run_data_script(lambda: write(args.output_dir, *asked), args.output_dir)


if __name__ == "__main__":
    sys.exit(generate(__doc__))
