"""Grades the responses of a reward ledger again and prints where the result differs.

``python -m tools.regrade LEDGER ... [--path FILE --name FUNCTION --kwargs JSON]``; a ledger is a file or a folder of
them (``reward_ledger`` beside a run's metrics). Without ``--path`` each line is graded by the function that it names,
as its file is now. Exit codes: 0 nothing differs, 1 something does, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.common.data_scripts import text_lines
from verl.utils.reward_score.functions import RewardFunctionSpec, load_reward_function
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult

EXIT_DIFFERENT = 1
EXIT_BAD_INPUT = 2
_TOLERANCE = 1e-9
SHOWN = 20  # differing lines that are printed without --all
_JOB = ("data_source", "response", "ground_truth", "extra_info")  # what a grader is given
_FIELDS = {
    "data_source": str,
    "response": str,
    "ground_truth": object,
    "status": str,
    "uid": str,
    "extra_info": dict,
    "grader": dict,
    "parts": dict,
    "score": (int, float),
}


@dataclass(frozen=True)
class Line:
    """One graded response: where it stands, what was recorded, what its grader was given."""

    where: str
    record: dict[str, Any]
    job: ScoringJob

    @property
    def grader(self) -> RewardFunctionSpec:
        """The function that graded it."""
        grader = self.record["grader"]
        return RewardFunctionSpec(grader["path"], grader["name"], grader["kwargs"])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _check_options(args)
        lines = list(read_ledgers(args.ledger))
        given = None
        if args.path is not None:
            given = RewardFunctionSpec(args.path, args.name, args.kwargs)
        for function in _distinct(lines, given):
            _check(function)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    results = regrade(
        lines, given, num_workers=args.workers, timeout_s=args.timeout, memory_limit_mb=args.memory_limit_mb
    )
    return print_differences(lines, results, most=len(lines) if args.all else SHOWN)


def read_ledgers(paths: Sequence[Path]) -> Iterator[Line]:
    """Every line of every file, folders in the order of their names; ValueError for a line that has no texts."""
    for path in paths:
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise ValueError(f"{path} is no ledger; expected a .jsonl file or a folder of them")
        for file in files:
            for number, text in enumerate(text_lines(file), start=1):
                yield _parsed(f"{file.name}:{number}", text)


def regrade(
    lines: Sequence[Line],
    function: RewardFunctionSpec | None,
    *,
    num_workers: int,
    timeout_s: float,
    memory_limit_mb: int = 0,
) -> list[ScoringResult]:
    """A result for each line, by ``function`` or, without one, by that of each line."""
    results: dict[int, ScoringResult] = {}
    for grader in _distinct(lines, function):
        chosen = [number for number, line in enumerate(lines) if function or line.grader == grader]
        pool = ScoringPool(grader, num_workers=num_workers, timeout_s=timeout_s, memory_limit_mb=memory_limit_mb)
        try:
            futures = pool.submit([lines[number].job for number in chosen])
            results |= {number: future.result() for number, future in zip(chosen, futures, strict=True)}
        finally:
            pool.close()
    return [results[number] for number in range(len(lines))]


def print_differences(lines: Sequence[Line], results: Sequence[ScoringResult], most: int) -> int:
    """A line for each response whose status or parts changed, ``most`` of them, then the counts; the exit code."""
    changes: Counter[str] = Counter()
    for line, result in zip(lines, results, strict=True):
        if changed := difference(line.record, result):
            changes[line.job.data_source] += 1
            if changes.total() <= most:
                print(f"{line.where} uid {line.record['uid']} {line.job.data_source}: {changed}")
    if changes.total() > most:
        print(f"... and {changes.total() - most} more, which --all prints")
    for source, total in sorted(Counter(line.job.data_source for line in lines).items()):
        print(f"{source}: {changes[source]} of {total} differ")
    before = sum(float(line.record["score"]) for line in lines) / max(len(lines), 1)
    after = sum(result.parts["score"] for result in results) / max(len(lines), 1)
    print(f"{changes.total()} of {len(lines)} differ; mean score {before:.4f} -> {after:.4f}")
    return EXIT_DIFFERENT if changes else 0


def difference(record: dict[str, Any], result: ScoringResult) -> str:
    """What changed between a line and a new result, empty when nothing did; texts and times are not compared."""
    changes = []
    if record["status"] != result.status:
        changes.append(f"{record['status']} -> {result.status}" + (f" ({result.error})" if result.error else ""))
    for name in sorted({*record["parts"], *result.parts}):
        old, new = record["parts"].get(name), result.parts.get(name)
        if old is None or new is None or abs(old - new) > _TOLERANCE:
            shown = ["none" if value is None else f"{value:g}" for value in (old, new)]
            changes.append(f"{name} {shown[0]} -> {shown[1]}")
    return ", ".join(changes)


def _parsed(where: str, text: str) -> Line:
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    lacking = [name for name, kind in _FIELDS.items() if not isinstance(record, dict) or not _is_a(kind, record, name)]
    grader = {} if lacking else record["grader"]
    if lacking or not {"path", "name", "kwargs"} <= grader.keys():
        raise ValueError(
            f"{where} has no {', '.join(lacking) or 'whole grader'}; only a ledger written with "
            "reward_model.ledger=texts holds what a grader needs"
        )
    return Line(where, record, ScoringJob(*(record[name] for name in _JOB)))


def _is_a(kind: Any, record: dict[str, Any], name: str) -> bool:
    return name in record and isinstance(record[name], kind)


def _check_options(args: argparse.Namespace) -> None:
    """ValueError for a value that is no use; ``kwargs`` becomes what its JSON says."""
    try:
        args.kwargs = json.loads(args.kwargs)
    except json.JSONDecodeError as error:
        raise ValueError(f"--kwargs {args.kwargs} is not JSON: {error}") from error
    if not isinstance(args.kwargs, dict):
        raise ValueError(f'--kwargs {args.kwargs}: expected an object, as {{"scale": 2}}')
    if args.memory_limit_mb < 0:
        raise ValueError(f"--memory-limit-mb {args.memory_limit_mb}: expected MiB, or 0 for no limit")
    if args.workers < 1 or not args.timeout > 0:
        raise ValueError(f"--workers {args.workers} --timeout {args.timeout:g}: expected at least 1, and above 0")


def _distinct(lines: Sequence[Line], given: RewardFunctionSpec | None) -> list[RewardFunctionSpec]:
    """The functions to be used, each once: their keyword arguments make them unhashable."""
    found: list[RewardFunctionSpec] = [given] if given else []
    for line in lines if given is None else ():
        if line.grader not in found:
            found.append(line.grader)
    return found


def _check(function: RewardFunctionSpec) -> None:
    """ValueError when it cannot be loaded or called as a reward function."""
    try:
        load_reward_function(function)
    except Exception as error:  # a process edge: the user's file runs here, and may raise anything
        raise ValueError(f"{function.name} of {function.path}: {type(error).__name__}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.regrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ledger", type=Path, nargs="+", help="step_N.jsonl, or the folder reward_ledger")
    parser.add_argument("--path", help="Python file of the reward function; default: the one that each line names")
    parser.add_argument("--name", default="compute_score")
    parser.add_argument("--kwargs", default="{}", help="keyword arguments of the function, as JSON")
    parser.add_argument("--all", action="store_true", help=f"print every line that differs, not the first {SHOWN}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds of one call")
    parser.add_argument("--memory-limit-mb", type=int, default=16384, help="MiB of each grader; 0 sets no limit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
