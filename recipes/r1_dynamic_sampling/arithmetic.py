"""Command: the shared arithmetic problems as JSON lines, with an evaluation set of sums and one of comparisons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.common.arithmetic import make_set
from recipes.common.stamp import write_text_atomically

INSTRUCTION = " Think first, then give the answer within \\boxed{}."
HELD_OUT = 10  # one problem of so many
EVAL_SETS = ("sums", "comparisons")


def write_set(output_dir: Path, num_problems: int, seed: int) -> None:
    """``prompts.jsonl`` and a file of each evaluation set; the same files for the same seed."""
    problems = make_set(num_problems, seed)
    count = len(problems) // HELD_OUT
    parts: dict[str, list[dict[str, object]]] = {"prompts": [], **{name: [] for name in EVAL_SETS}}
    for position, item in enumerate(problems):
        is_sum = "+" in item["problem"]
        name = EVAL_SETS[0 if is_sum else 1] if position < count else "prompts"
        content = item["problem"] + INSTRUCTION
        parts[name].append({"prompt": [{"role": "user", "content": content}], "label": item["answer"]})
    for name, rows in parts.items():
        write_text_atomically(output_dir / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m recipes.r1_dynamic_sampling.arithmetic``."""
    parser = argparse.ArgumentParser(prog="python -m recipes.r1_dynamic_sampling.arithmetic", description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-problems", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    write_set(args.output_dir, args.num_problems, args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
