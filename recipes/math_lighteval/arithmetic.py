"""Command: the shared arithmetic problems in MATH-lighteval's form, for a run without a data set."""

from __future__ import annotations

from pathlib import Path

from recipes.common.arithmetic import generate, make_set, write_sides


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
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
    write_sides(output_dir, rows)
    return [f"wrote {num_problems} arithmetic problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
