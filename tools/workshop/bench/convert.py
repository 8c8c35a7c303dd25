"""``python -m tools.workshop.bench.convert``: rates of conversions beside those of copying the same bytes.

On a checkpoint with DeepSeek-V3's true widths (few layers and experts): FP8 to BF16, BF16 to shards, FP8 to shards,
each beside a copy, file to file, of what it wrote, and FP8 to BF16 beside a plain implementation of the published
algorithm (whole files in memory, scales repeated, file after file). All write durably (fsync of each file) and take
turns. A rate is bytes written per second of wall time, in GB/s; CPU seconds are of this process.

Every subject meets the same page cache: nothing of any output, all of its own input (read right before it).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_formats.config import without_quantisation_and_mtp
from hf_formats.files import sync_path
from hf_formats.fp8 import FP8_DTYPE, SCALE_SUFFIX
from mindspeed_llm.cli_io import run_cli
from mindspeed_llm.conversion.engine import RunOptions, convert
from mindspeed_llm.convert_ckpt_deepseek3 import plan_shards
from mindspeed_llm.fp8_cast_bf16 import plan_cast
from mindspeed_llm.sharded_checkpoint import shard_layout
from tools.workshop.bench.models import deepseek_v3_config
from tools.workshop.bench.options import aligned, parser_of, write_report
from tools.workshop.bench.published_checkpoint import write_published_checkpoint
from tools.workshop.bench.remote import report_progress

_QUIET_S = 0.5
_READ_BYTES = 8 << 20
_FILE_BYTES = 4 * 10**8  # of a BF16 file


@dataclass(frozen=True)
class Subject:
    """``work`` reads ``source`` and writes ``out`` beside it."""

    name: str
    source: Path
    work: Callable[[], object]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write all timings as JSON when asked."""
    parser = parser_of("convert", __doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where to work; a few times the checkpoint's size")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers, the first dense")
    parser.add_argument("--experts", type=int, default=16, help="experts of a layer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="subjects whose names have this in them, say BF16")

    def body(arguments: argparse.Namespace) -> None:
        root = arguments.dir
        chosen = [one for one in subjects(root) if arguments.only in one.name]
        make_inputs(root, arguments.layers, arguments.experts, {subject.source for subject in chosen})
        timings = measure(root, chosen, arguments.rounds)
        write_report(arguments.json, timings)
        print("\n".join(table(timings)))

    return run_cli(parser, body, None if argv is None else list(argv))


def make_inputs(root: Path, num_layers: int, num_experts: int, sources: Collection[Path]) -> None:
    """Write a checkpoint of DeepSeek-V3's widths in FP8, in BF16 and, where it is one of the ``sources``, as shards."""
    counts = {"num_hidden_layers": num_layers, "n_routed_experts": num_experts, "first_k_dense_replace": 1}
    config = deepseek_v3_config(**counts, vocab_size=16384, n_group=4, topk_group=2, num_nextn_predict_layers=0)
    write_published_checkpoint(root / "fp8", config, num_files=2 * num_layers)
    cast(root / "fp8", root / "bf16")
    if root / "shards" in sources:
        shard(root / "bf16", root / "shards")


def measure(root: Path, subjects: Sequence[Subject], rounds: int) -> list[dict[str, Any]]:
    """Seconds, CPU seconds and bytes written of every subject, once a round, in turn."""
    timings, output = [], root / "out"
    for round_number in range(rounds):
        for subject in subjects:
            shutil.rmtree(output, ignore_errors=True)
            prepare_cache(root, subject.source)
            time.sleep(_QUIET_S)
            start, start_cpu = time.perf_counter(), time.process_time()
            subject.work()
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
            num_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
            figures = f"{seconds:7.2f} s, {cpu_s:6.2f} of CPU {num_bytes / seconds / 1e9:6.2f} GB/s"
            report_progress(f"round {round_number} {subject.name:32} {figures}")
            timings.append({"subject": subject.name, "seconds": seconds, "cpu_s": cpu_s, "num_bytes": num_bytes})
    shutil.rmtree(output, ignore_errors=True)
    return timings


def prepare_cache(root: Path, warm: Path) -> None:
    """Drop what lies below ``root`` from the page cache, but read ``warm`` into it."""
    descriptor = os.open(root, os.O_RDONLY)
    ctypes.CDLL(None).syncfs(descriptor)  # what is not yet on the disk cannot be dropped
    os.close(descriptor)
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                if warm not in path.parents:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while warm in path.parents and stream.read(_READ_BYTES):
                    pass


def subjects(root: Path) -> list[Subject]:
    """All subjects, in an order that puts those that are compared next to each other."""
    fp8, bf16, shards, out = root / "fp8", root / "bf16", root / "shards", root / "out"
    return [
        Subject("copy of BF16", bf16, partial(copy, bf16, out)),
        Subject("FP8 to BF16", fp8, partial(cast, fp8, out)),
        Subject("FP8 to BF16, published algorithm", fp8, partial(published_algorithm, fp8, out)),
        Subject("copy of shards", shards, partial(copy, shards, out)),
        Subject("BF16 to shards", bf16, partial(shard, bf16, out)),
        Subject("FP8 to shards", fp8, partial(shard, fp8, out)),
    ]


def cast(source: Path, target: Path) -> None:
    """FP8 to BF16 in files of 0.4 GB."""
    conversion = plan_cast(source, max_shard_bytes=_FILE_BYTES)
    convert(conversion, target, RunOptions(kernels="native"))


def shard(source: Path, target: Path) -> None:
    """HF to shards of TP2 EP4 with whole experts."""
    layout = shard_layout(2, 1, 4, tp_extend_ep=True)
    conversion = plan_shards(source, layout, "mindspeed_llm")
    convert(conversion, target, RunOptions(kernels="native"))


def copy(source: Path, target: Path) -> None:
    """Each file as the system copies it, made durable."""

    def copy_file(path: str, to: str) -> None:
        shutil.copyfile(path, to)
        sync_path(Path(to))

    shutil.copytree(source, target, copy_function=copy_file)


@torch.no_grad()
def published_algorithm(source: Path, target: Path) -> None:
    """File by file: load all of it, multiply each FP8 weight by its scales repeated to its shape, save all of it."""
    target.mkdir()
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    loaded: dict[str, dict[str, torch.Tensor]] = {}

    def tensor(name: str) -> torch.Tensor:
        file = weight_map[name]
        if file not in loaded:
            loaded[file] = load_file(source / file)
        return loaded[file][name]

    for file in sorted(set(weight_map.values())):
        converted = {}
        for name in [name for name, owner in weight_map.items() if owner == file and not name.endswith(SCALE_SUFFIX)]:
            weight = tensor(name)
            if weight.dtype == FP8_DTYPE:
                rows, columns = weight.shape
                scale = tensor(name + SCALE_SUFFIX).repeat_interleave(128, 0).repeat_interleave(128, 1)
                weight = (weight.float() * scale[:rows, :columns]).to(torch.bfloat16)
            converted[name] = weight
        save_file(converted, target / file, metadata={"format": "pt"})
        sync_path(target / file)
        while len(loaded) > 2:
            del loaded[next(iter(loaded))]
    plain = without_quantisation_and_mtp(json.loads((source / "config.json").read_text()))
    (target / "config.json").write_text(json.dumps(plain))


def table(timings: Sequence[dict[str, Any]]) -> list[str]:
    """Median rate of each subject, and what it is compared with."""
    rates, cpu_s = {}, {}
    for name in dict.fromkeys(timing["subject"] for timing in timings):
        same = [timing for timing in timings if timing["subject"] == name]
        rates[name] = statistics.median(timing["num_bytes"] / timing["seconds"] / 1e9 for timing in same)
        cpu_s[name] = statistics.median(timing["cpu_s"] for timing in same)
    copies = {name: rates.get("copy of shards" if "shards" in name else "copy of BF16") for name in rates}
    columns = {"": "<34", "GB/s": ">6.2f", "/ copy": ">7.2f", "CPU s": ">6.2f"}
    parts = {name: rates[name] / copy if copy else None for name, copy in copies.items()}
    lines = aligned(columns, [(name, rates[name], parts[name], cpu_s[name]) for name in rates])
    if {"FP8 to BF16", "FP8 to BF16, published algorithm"} <= rates.keys():
        plain = rates["FP8 to BF16"] / rates["FP8 to BF16, published algorithm"]
        lines.append(f"FP8 to BF16 / published algorithm: {plain:.1f}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
