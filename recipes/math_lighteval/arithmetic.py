"""Command: the shared arithmetic problems in MATH-lighteval's form, for a run without a data set."""

from __future__ import annotations

from pathlib import Path

from recipes.common.arithmetic import HELD_OUT, generate, make_set, write_json_lines


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
        write_json_lines(output_dir / f"{side}.jsonl", part)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m recipes.math_lighteval.arithmetic``."""
    return generate("recipes.math_lighteval.arithmetic", __doc__, write_set, argv)


if __name__ == "__main__":
    raise SystemExit(main())
