"""What every conversion command offers beside its own flags: how to run, what it would do, whether it did it right."""

from __future__ import annotations

import argparse
import math
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from mindspeed_llm.cli_io import run_cli, say
from mindspeed_llm.conversion.engine import Conversion, RunOptions, convert, partial_directory, verify
from mindspeed_llm.conversion.kernels import choose_kernels
from mindspeed_llm.conversion.slab_reader import in_flight_bytes
from mindspeed_llm.conversion.synced_file import WAITING_BYTES
from mindspeed_llm.hf_shapes import hf_tensors, shared_copies

_MIB = 2**20
_RECORD_BYTES = 200  # the journal's record of a tensor, in memory until the manifest is written


def conversion_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m mindspeed_llm.{command}``; the directory to make is to be called ``output``."""
    return argparse.ArgumentParser(
        prog=f"python -m mindspeed_llm.{command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_checkpoint_flags(parser: argparse.ArgumentParser, needs_hf_config: bool = False) -> None:
    """The flags of the commands that read checkpoints of several kinds."""
    kinds = "shards of either kind, or a training checkpoint" + ("" if needs_hf_config else ", or Hugging Face form")
    parser.add_argument("--load-dir", type=Path, required=True, help=kinds)
    parser.add_argument("--save-dir", dest="output", type=Path, required=True, help="directory to make")
    what = "config.json and tokenizer" if needs_hf_config else "the config.json of a training checkpoint"
    parser.add_argument("--hf-config-dir", type=Path, required=needs_hf_config, help=f"directory of {what}")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to convert")


def run_conversion(
    parser: argparse.ArgumentParser, plan: Callable[[argparse.Namespace], Conversion], argv: list[str] | None
) -> int:
    """Add the flags of how to run, parse, and convert, forecast or verify the output; returns the exit status."""
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
    return run_cli(parser, lambda arguments: _run(arguments, plan), argv)


def _run(arguments: argparse.Namespace, plan: Callable[[argparse.Namespace], Conversion]) -> None:
    output: Path = arguments.output
    if arguments.verify:
        manifest = verify(output, arguments.workers)
        num_tensors = sum(len(record.tensors) for record in manifest.files.values())
        say(f"{output} is whole: {num_tensors} tensors in {len(manifest.files)} files have their checksums")
        return
    conversion = plan(arguments)
    command = conversion.command
    kernels = choose_kernels(arguments.kernels)
    options = RunOptions(arguments.workers, arguments.max_memory * _MIB, arguments.resume, kernels)
    if arguments.dry_run:
        lines = _forecast(conversion, output, options)
        say("\n".join([f"{command}: nothing is written; this would make {output}", *lines]))
        return
    say(f"kernels: {kernels}")
    is_new = convert(conversion, output, options)
    state = "written to" if is_new else "is complete; nothing to do:"
    say(f"{len(conversion.writer.files())} files of {command} {state} {output}")


def _forecast(conversion: Conversion, output: Path, options: RunOptions) -> list[str]:
    """Lines that say, from the plan of every file alone, what the conversion will take; nothing is read or written.

    Peak memory is the most that the slab being made takes with all that it is made of, and what waits to be written,
    beside the process itself (interpreter, torch, plan, journal).
    """
    hf, writer = conversion.hf, conversion.writer
    sizes = [writer.file_bytes(file) for file in writer.files()]
    tensors = [tensor for file in writer.files() for tensor in writer.tensors(file)]
    slab_bytes = max(in_flight_bytes(tensor, conversion.source, options.max_bytes) for tensor in tensors)
    tensor_bytes = slab_bytes + WAITING_BYTES
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    process_bytes += len(tensors) * _RECORD_BYTES
    copies = shared_copies(hf)
    num_parameters = sum(math.prod(shape) for name, (shape, _) in hf_tensors(hf).items() if name not in copies)
    place = partial_directory(output.absolute())
    free_bytes = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    workers = f", in each of {options.num_workers} workers" if options.num_workers > 1 else ""
    num_bytes = sum(sizes)
    verdict = "enough" if free_bytes >= num_bytes else "NOT ENOUGH"
    return [
        f"parameters     {num_parameters:,}",
        f"files          {len(sizes)}",
        f"bytes          {num_bytes:,} ({num_bytes / 1e9:.1f} GB)",
        f"bytes of a file (rank)  {min(sizes):,} to {max(sizes):,}",
        f"peak memory    {_mib(process_bytes + tensor_bytes)} MiB{workers}: tensors {_mib(tensor_bytes)} MiB, "
        f"the process itself {_mib(process_bytes)} MiB",
        f"disk           {num_bytes / 1e9:.1f} GB needed, {free_bytes / 1e9:.1f} GB free: {verdict}",
    ]


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)


def positive(text: str) -> int:
    """An argument of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
