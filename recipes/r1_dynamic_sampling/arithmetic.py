"""Command: the shared arithmetic problems as JSON lines, with an evaluation set of sums and one of comparisons."""

from __future__ import annotations

from pathlib import Path

from recipes.common.arithmetic import HELD_OUT, generate, make_set, write_json_lines

INSTRUCTION = " Think first, then give the answer within \\boxed{}."
EVAL_SETS = ("sums", "comparisons")


def write_set(output_dir: Path, num_problems: int, seed: int) -> list[str]:
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
        write_json_lines(output_dir / f"{name}.jsonl", rows)
    return [f"wrote {num_problems} arithmetic problems to {output_dir}"]


if __name__ == "__main__":
    raise SystemExit(generate(__doc__, write_set))
