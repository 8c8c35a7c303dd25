"""The default problem set: sums, maxima and minima of one-digit integers in ``deepscaler.json``'s form."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.common.atomic_files import write_text_atomically
from recipes.common.data_scripts import run_data_script

KINDS = ("sum", "maximum", "minimum")
HELD_OUT = 10  # one problem in so many is held out, where a recipe's form of the set has a test side


def make_problem(kind: str, numbers: tuple[int, ...]) -> dict[str, str]:
    """One problem about the numbers, with its answer and a solution that ends in ``= <answer>``."""
    if kind == "sum":
        return {
            "problem": f"What is {' + '.join(map(str, numbers))}?",
            "answer": str(sum(numbers)),
            "solution": _running_sum(numbers),
        }
    word, function = ("largest", max) if kind == "maximum" else ("smallest", min)
    answer = str(function(numbers))
    listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return {
        "problem": f"What is the {word} of {listed}?",
        "answer": answer,
        "solution": f"{function.__name__}({', '.join(map(str, numbers))}) = {answer}",
    }


def solution_of(problem: str) -> str:
    """The worked solution of a problem of ``make_problem``; an empty text for any other."""
    numbers = tuple(int(number) for number in re.findall(r"\d{1,9}", problem))
    words = {"sum": " + ", "maximum": "largest", "minimum": "smallest"}
    for kind, word in words.items():
        if word in problem and len(numbers) > 1 and (made := make_problem(kind, numbers))["problem"] == problem:
            return made["solution"]
    return ""


def _running_sum(numbers: tuple[int, ...]) -> str:
    """The sum from left to right, ``3 + 7 = 10, 10 + 2 = 12``: steps that a very small model can learn."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return ", ".join(steps)


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
    write_text_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def generate(
    module: str, description: str | None, write_set: Callable[[Path, int, int], None], argv: list[str] | None
) -> int:
    """The command line of a recipe's own form of the problems: ``write_set(output_dir, num_problems, seed)``."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    write_set(args.output_dir, args.num_problems, args.seed)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Command line: write the set unless the file is there with the same content."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--num_problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)

    def run() -> list[str] | None:
        text = json.dumps(make_set(args.num_problems, args.seed), indent=1) + "\n"
        if args.output.is_file() and args.output.read_text(encoding="utf-8") == text:
            return None
        write_text_atomically(args.output, text)
        return [f"wrote {args.num_problems} arithmetic problems to {args.output}"]

    return run_data_script(run, args.output)


if __name__ == "__main__":
    sys.exit(main())
