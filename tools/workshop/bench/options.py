"""What the benchmarks' commands share: options of engines, checks of them, tables and reports."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_formats.cores import usable_cores


def parser_of(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m tools.workshop.bench.<module>``, with ``--json``."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.workshop.bench.{module}", description=description)
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    return parser


def add_engine_options(
    parser: argparse.ArgumentParser, engines: Sequence[str], default: Sequence[str], dtype: str, variants: Sequence[str]
) -> None:
    """Add what every comparison of generating engines takes.

    The second of ``engines`` is the one with an environment of its own, the last one the one that has ``variants``.
    """
    parser.add_argument("--engines", nargs="+", default=list(default), help=f"of {', '.join(engines)}")
    parser.add_argument(f"--{engines[1]}-python", help=f"interpreter of an environment with {engines[1]}")
    parser.add_argument("--threads", type=int, default=2, help="threads and CPUs of each engine (default: 2)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=dtype)
    text = f"attention,experts of {engines[-1]}; of several, the quickest is taken (default: all)"
    parser.add_argument("--variants", nargs="+", default=list(variants), help=text)
    parser.add_argument("--prompt-lengths", type=int, nargs=2, default=[16, 48], metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--new-tokens", type=int, default=128)


def unknown_choices(*options: tuple[str, Iterable[str], Iterable[str]]) -> list[str]:
    """A sentence for each (option, known names, given names) with a name that is not known."""
    unknown = {option: (set(given) - set(known), known) for option, known, given in options}
    return [
        f"{option} has {', '.join(sorted(names))}; known: {', '.join(known)}"
        for option, (names, known) in unknown.items()
        if names
    ]


def engine_problems(options: argparse.Namespace, engines: Sequence[str], variants: Sequence[str]) -> list[str]:
    """What is wrong with the options of ``add_engine_options``."""
    problems = unknown_choices(("--engines", engines, options.engines), ("--variants", variants, options.variants))
    apart, python = engines[1], getattr(options, f"{engines[1]}_python")
    if apart in options.engines and not (python and shutil.which(python)):
        where = "an environment as in tools/workshop/bench/README.md"
        problems.append(f"--{apart}-python is {python or 'absent'}; give the interpreter of {where}")
    return problems + thread_problems(options.threads)


def thread_problems(num_threads: int) -> list[str]:
    """Why an engine cannot have so many threads, each with a CPU."""
    num_cpus = usable_cores()
    return [f"--threads {num_threads}: this process may use {num_cpus} CPUs"] if num_threads > num_cpus else []


def refused(program: str, problems: Sequence[str]) -> bool:
    """Print the problems, one a line; whether there are any."""
    if problems:
        print(f"{program}:", *(f"  - {problem}" for problem in problems), sep="\n", file=sys.stderr)
    return bool(problems)


def aligned(columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Aligned lines, the headings first.

    Args:
        columns: the format of each heading's column, such as ``<20`` or ``>8.2f``.
        rows: the cells in the order of the columns; None is shown as ``-``.
    """
    widths = [form.partition(".")[0].rstrip("f%d,") for form in columns.values()]
    lines = [[format(name, width) for name, width in zip(columns, widths, strict=True)]]
    for row in rows:
        cells = zip(row, columns.values(), widths, strict=True)
        lines.append([format("-", width) if cell is None else format(cell, form) for cell, form, width in cells])
    return [" ".join(cells).rstrip() for cells in lines]


def write_report(path: Path | None, report: Any) -> None:
    """Write everything measured as JSON, when a file was asked for."""
    if path:
        path.write_text(json.dumps(report, indent=1, default=str) + "\n")
