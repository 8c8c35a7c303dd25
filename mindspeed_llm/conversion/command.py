"""What every conversion command offers beside its own flags: how to run, what it would do, whether it did it right."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_formats.config import HFModelConfig
from mindspeed_llm.cli_io import say
from mindspeed_llm.conversion.engine import Conversion, RunOptions, convert, verify
from mindspeed_llm.conversion.forecast import forecast
from mindspeed_llm.conversion.kernels import choose_kernels

_MIB = 2**20


@dataclass(frozen=True)
class Request:
    """A conversion that flags ask for, and the model that it writes."""

    conversion: Conversion
    hf: HFModelConfig


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ``run_request`` reads."""
    group = parser.add_argument_group("how to run")
    group.add_argument("--workers", type=positive, default=1, help="processes, each writing a file at a time")
    group.add_argument(
        "--max-memory",
        type=positive,
        default=RunOptions.max_bytes // _MIB,
        metavar="MIB",
        help="MiB for tensors being made in each worker, beside the process itself and 8 MiB that are being written "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--kernels",
        choices=("auto", "native", "torch"),
        default="auto",
        help="what moves weights: C loops built with cc at first use, or torch, slower with the same bits "
        "(auto: native where there is a compiler)",
    )
    group.add_argument("--resume", action="store_true", help="continue an unfinished output, if there is one")
    group.add_argument("--dry-run", action="store_true", help="print files, bytes, peak memory and disk; write nothing")
    group.add_argument("--verify", action="store_true", help="read the finished output and check all of it instead")


def run_request(arguments: argparse.Namespace, output: Path, request: Callable[[], Request]) -> None:
    """Do what the flags ask for: convert, forecast or verify ``output``."""
    if arguments.verify:
        manifest = verify(output, arguments.workers)
        num_tensors = sum(len(record.tensors) for record in manifest.files.values())
        say(f"{output} is whole: {num_tensors} tensors in {len(manifest.files)} files have their checksums")
        return
    asked = request()
    options = RunOptions(
        arguments.workers, arguments.max_memory * _MIB, arguments.resume, choose_kernels(arguments.kernels)
    )
    if arguments.dry_run:
        found = forecast(asked.conversion, asked.hf, output, options)
        say("\n".join([f"{asked.conversion.command}: nothing is written; this would make {output}", *found.lines()]))
        return
    say(f"kernels: {options.kernels}")
    is_new = convert(asked.conversion, output, options)
    state = "written to" if is_new else "is complete; nothing to do:"
    say(f"{len(asked.conversion.writer.files())} files of {asked.conversion.command} {state} {output}")


def positive(text: str) -> int:
    """An argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
