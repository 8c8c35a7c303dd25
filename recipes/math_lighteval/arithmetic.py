"""Command: the shared arithmetic problems in MATH-lighteval's form, for a run without a data set."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.common.arithmetic import make_set
from recipes.common.stamp import write_text_atomically

HELD_OUT = 10  # one problem of so many


def write_set(output_dir: Path, num_problems: int, seed: int) -> None:
    """``train.jsonl`` and ``test.jsonl``; the same files for the same seed."""
    rows = [
        {
            "problem": item["problem"],
            "level": "Level 1",
            "type": "Arithmetic",
            "solution": f"{item['solution']}. The answer is $\\boxed{{{item['answer']}}}$.",
        }
        for item in make_set(num_problems, seed)
    ]
    count = len(rows) // HELD_OUT
    for side, part in (("test", rows[:count]), ("train", rows[count:])):
        write_text_atomically(output_dir / f"{side}.jsonl", "".join(json.dumps(row) + "\n" for row in part))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m recipes.math_lighteval.arithmetic``."""
    parser = argparse.ArgumentParser(prog="python -m recipes.math_lighteval.arithmetic", description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    write_set(args.output_dir, args.num_problems, args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
