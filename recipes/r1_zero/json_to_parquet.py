"""From a ``deepscaler.json`` (a list of problem, answer, solution) to verl's ``train.parquet`` and ``test.parquet``."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_formats.chat import chat_text
from hf_formats.files import write_text
from hf_formats.stamps import is_made_from, write_stamp
from hf_formats.tokenizer import load_tokenizer
from recipes.common.data_scripts import digest_of, run_data_script, verl_row, write_parquet
from recipes.common.options import DataScriptParser, user_path

DATA_SOURCE = "deepscaler"
SYSTEM_TEMPLATE = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think><answer> answer here </answer>. "
    "Put your final answer within \\boxed{}. "
)
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


@dataclass(frozen=True)
class Problem:
    """One usable row of the input."""

    index: int  # position in the input list
    problem: str
    answer: str
    solution: str


@dataclass
class DataReport:
    """The fate of every row: ``rows_read`` is the sum of skipped, duplicates, over-long, train and test rows."""

    json_path: str
    rows_read: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)  # {"index", "reason"}
    duplicates: list[dict[str, Any]] = field(default_factory=list)  # {"index", "same_as", "same_answer"}
    over_long: list[dict[str, Any]] = field(default_factory=list)  # {"index", "tokens"}
    train_rows: int = 0
    test_rows: int = 0

    def lines(self) -> list[str]:
        """The report as text, one line per fact and one per skipped row."""
        return [
            f"read {self.rows_read} rows of {self.json_path}",
            *(f"skipped row {entry['index']}: {entry['reason']}" for entry in self.skipped),
            *(
                f"row {entry['index']} repeats row {entry['same_as']} with another answer: the first one counts"
                for entry in self.duplicates
                if not entry["same_answer"]
            ),
            f"{len(self.skipped)} skipped, {len(self.duplicates)} duplicates removed, {len(self.over_long)} over-long "
            f"filtered, {self.train_rows} for training, {self.test_rows} held out",
        ]


def read_rows(json_path: Path) -> list[Any]:
    """The list in ``json_path``; ValueError when the file is missing, is not JSON, or has no non-empty list."""
    expected = "expected a JSON list of objects with problem, answer and solution (the form of deepscaler.json)"
    if not json_path.is_file():
        raise ValueError(f"--json_path {json_path}: no such file; {expected}")
    try:
        rows = json.loads(json_path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        hint = "; one object per line is not a list" if json_path.suffix == ".jsonl" else ""
        raise ValueError(f"--json_path {json_path}: not a JSON text ({error}){hint}; {expected}") from error
    if not isinstance(rows, list) or not rows:
        kind = "an empty list" if rows == [] else f"a {type(rows).__name__}"
        raise ValueError(f"--json_path {json_path}: holds {kind}; {expected}")
    if not any(isinstance(row, dict) and "problem" in row and "answer" in row for row in rows):
        raise ValueError(f"--json_path {json_path}: none of its {len(rows)} rows has problem and answer; {expected}")
    return rows


def usable_row(index: int, row: Any) -> Problem | str:
    """The row as a ``Problem``, or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object"
    for key in ("problem", "answer"):
        value = row.get(key)
        if value is None:
            return f"{key} is {'null' if key in row else 'missing'}"
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            return f"{key} is a {type(value).__name__}, not a text or a number"
        if not str(value).strip():
            return f"{key} is empty"
    solution = row.get("solution")  # only for the reader, so a row without one is usable
    solution = solution.strip() if isinstance(solution, str) else ""
    return Problem(index, str(row["problem"]).strip(), str(row["answer"]).strip(), solution)


def same_side_key(problem: str) -> str:
    """A key that is the same for problems that differ only in spacing, dollars, commas, full stops or case."""
    return re.sub(r"\s+|[$,.?]|\\(?:left|right|[,!;: ])|(?<=\\)[dt](?=frac)", "", problem).lower()


def without_duplicates(problems: list[Problem], report: DataReport) -> list[Problem]:
    """The first of each problem text (white space made equal); the others go into the report."""
    first: dict[str, Problem] = {}
    for item in problems:
        if (seen := first.setdefault(" ".join(item.problem.split()), item)) is not item:
            same_answer = seen.answer == item.answer
            report.duplicates.append({"index": item.index, "same_as": seen.index, "same_answer": same_answer})
    return list(first.values())


def split(problems: list[Problem], train_data_ratio: float, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Seeded shuffle into train and test; near-duplicates (``same_side_key``) stay together on one side."""
    groups: dict[str, list[Problem]] = {}
    for item in problems:
        groups.setdefault(same_side_key(item.problem), []).append(item)
    shuffled = list(groups.values())
    random.Random(seed).shuffle(shuffled)
    target = round(len(problems) * train_data_ratio)
    train: list[Problem] = []
    test: list[Problem] = []
    for group in shuffled:
        (train if len(train) + len(group) <= target else test).extend(group)
    if not train or not test:
        raise ValueError(
            f"--train_data_ratio {train_data_ratio} leaves {len(train)} training and {len(test)} test rows of "
            f"{len(problems)} usable ones; expected at least one on each side: choose another ratio or give more rows"
        )
    return train, test


def messages(problem: str) -> list[dict[str, str]]:
    """The chat that poses a problem: R1-Zero's system template, then the user's question."""
    return [{"role": "system", "content": SYSTEM_TEMPLATE}, {"role": "user", "content": problem}]


def _write_side(items: list[Problem], side: str, path: Path) -> None:
    """Write one side; ``extra_info.index`` is a row's place in the input list."""
    rows = [verl_row(DATA_SOURCE, messages(item.problem), item.answer, side, item.index) for item in items]
    for row, item in zip(rows, items, strict=True):
        row["extra_info"]["answer"] = item.solution
    write_parquet(rows, path, extra_texts=("answer",))


def prompt_lengths(problems: list[Problem], tokenizer_path: str) -> dict[int, int]:
    """Index of a problem -> number of tokens of its whole prompt under that tokenizer's chat template."""
    tokenizer = load_tokenizer(tokenizer_path)
    lengths = {}
    for item in problems:
        text = chat_text(tokenizer, messages(item.problem))
        lengths[item.index] = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return lengths


def convert(
    json_path: Path,
    output_dir: Path,
    train_data_ratio: float = 0.9,
    seed: int = 42,
    tokenizer: str | None = None,
    max_prompt_length: int | None = None,
) -> DataReport | None:
    """Write both parquet files and ``data_report.json``; None when they are there and their inputs unchanged."""
    if not 0.0 < train_data_ratio < 1.0:
        raise ValueError(f"--train_data_ratio {train_data_ratio}: expected a number between 0 and 1, for example 0.9")
    if (tokenizer is None) != (max_prompt_length is None):
        raise ValueError("--tokenizer and --max_prompt_length filter together: give both or neither")
    rows = read_rows(json_path)
    settings = {"form": FORM_VERSION, "template": SYSTEM_TEMPLATE, "ratio": train_data_ratio, "seed": seed}
    settings |= {"tokenizer": tokenizer, "max_prompt_length": max_prompt_length}
    made_from = {"digest": digest_of(settings, [json_path])}
    if is_made_from(output_dir, made_from):
        return None
    report = DataReport(str(json_path), rows_read=len(rows))
    items = [usable_row(index, row) for index, row in enumerate(rows)]
    report.skipped = [{"index": index, "reason": item} for index, item in enumerate(items) if isinstance(item, str)]
    problems = without_duplicates([item for item in items if not isinstance(item, str)], report)
    if tokenizer is not None and max_prompt_length is not None:
        lengths = prompt_lengths(problems, tokenizer)
        report.over_long = [{"index": i, "tokens": n} for i, n in lengths.items() if n > max_prompt_length]
        problems = [item for item in problems if lengths[item.index] <= max_prompt_length]
    train, test = split(problems, train_data_ratio, seed)
    report.train_rows, report.test_rows = len(train), len(test)
    files = [output_dir / name for name in ("train.parquet", "test.parquet", "data_report.json")]
    _write_side(train, "train", files[0])
    _write_side(test, "test", files[1])
    write_text(files[2], json.dumps(asdict(report), indent=1, ensure_ascii=False) + "\n")
    write_stamp(output_dir, made_from, files)
    return report


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for an input that a user can mend."""
    parser = DataScriptParser(__doc__)
    parser.add_argument("--json_path", type=user_path, default="./deepscaler.json", help="the list of problems")
    parser.add_output("where train.parquet and test.parquet go")
    parser.add_argument("--train_data_ratio", type=float, default=0.9, help="part of the rows that is trained on")
    parser.add_argument("--seed", type=int, default=42, help="seed of the shuffle")
    parser.add_argument("--tokenizer", help="HF directory; with --max_prompt_length drops over-long prompts")
    parser.add_argument("--max_prompt_length", type=int, help="longest prompt in tokens, template included")
    args = parser.parse_args(argv)

    def run() -> list[str] | None:
        report = convert(**vars(args))
        done = f"wrote train.parquet, test.parquet and data_report.json to {args.output_dir}"
        return None if report is None else [*report.lines(), done]

    return run_data_script(run, args.output_dir)


if __name__ == "__main__":
    sys.exit(main())
