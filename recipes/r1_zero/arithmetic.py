"""The default problem set: sums, differences, maxima and minima of small integers in ``deepscaler.json``'s form."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

if not __package__:  # run by its path: let the repository's packages be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.r1_zero.stamp import write_text_atomically

KINDS = ("sum", "difference", "maximum", "minimum")
LARGEST = 50


def make_problem(kind: str, a: int, b: int) -> dict[str, str]:
    """One problem about the integers a and b, with its answer and a one-line solution."""
    if kind == "sum":
        question, working, answer = f"What is {a} + {b}?", f"{a} + {b}", a + b
    elif kind == "difference":
        a, b = max(a, b), min(a, b)
        question, working, answer = f"What is {a} - {b}?", f"{a} - {b}", a - b
    elif kind == "maximum":
        question, working, answer = f"What is the larger of {a} and {b}?", f"max({a}, {b})", max(a, b)
    else:
        question, working, answer = f"What is the smaller of {a} and {b}?", f"min({a}, {b})", min(a, b)
    return {"problem": question, "answer": str(answer), "solution": f"{working} = {answer}"}


def make_set(num_problems: int = 4000, seed: int = 42) -> list[dict[str, str]]:
    """``num_problems`` different problems, the kinds evenly mixed, the same for the same seed."""
    most = 4 * (LARGEST * (LARGEST - 1) // 2)
    if not 0 < num_problems <= most:
        raise ValueError(f"--num_problems {num_problems}: expected 1 to {most}, as many different problems there are")
    generator = random.Random(seed)
    by_question: dict[str, dict[str, str]] = {}
    while len(by_question) < num_problems:
        kind = KINDS[len(by_question) % len(KINDS)]
        a, b = generator.sample(range(1, LARGEST + 1), 2)
        item = make_problem(kind, a, b)
        by_question.setdefault(item["problem"], item)
    return list(by_question.values())


def main(argv: list[str] | None = None) -> int:
    """Command line: write the set unless the file is there with the same content."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--num_problems", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        text = json.dumps(make_set(args.num_problems, args.seed), indent=1) + "\n"
        if args.output.is_file() and args.output.read_text(encoding="utf-8") == text:
            console.print(f"{args.output}: complete, nothing to do")
            return 0
        write_text_atomically(args.output, text)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red")
        return 2
    console.print(f"wrote {args.num_problems} arithmetic problems to {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
