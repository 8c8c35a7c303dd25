"""``python -m tools.bench.train``: tokens per second, peak memory and use of the matmul peak, beside transformers.

Every engine lives in a process of its own with the same CPUs, threads and allocator; the engines of a
group are alive together and take their steps in turns on the same sequences, so that whatever else the machine does
meets all of them. Figures are medians; ratios are of medians within a group. At the default size the default group, all
in bf16, needs 18 GiB; one with fp32 weights needs 26 GiB (``--num-layers 4`` makes that 14).
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.allocator import allocator_name
from tools.bench.options import refused, thread_problems, unknown_choices, write_report
from tools.bench.remote import EngineProcess, EngineSpec, cpus_for, this_python
from tools.bench.train_model import Batch, equal_batch, hf_config_dict, matmul_flops, mixed_batch, parsed

ENGINES = ("megatron", "megatron-lean", "transformers-bf16", "transformers-autocast", "transformers-fp32")
PROGRAM = "train_engines.py"


@dataclass
class Measured:
    """Steps of one engine on one kind of batch: seconds and CPU seconds each, losses, peak resident bytes.

    ``matmul_peaks``: floating-point operations per second of large matmuls by dtype, right before each step.
    """

    engine: str
    batch: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    matmul_peaks: list[dict[str, float]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _options().parse_args(argv)
    raw = hf_config_dict(options.hidden_size, options.num_layers, options.num_experts, options.vocab_size)
    batches = {
        "equal": [equal_batch(options.tokens, options.length, options.vocab_size, i) for i in range(options.steps + 1)],
        "mixed": [mixed_batch(options.tokens, options.length, options.vocab_size, i) for i in range(options.steps + 1)],
    }
    engines = {name for group in options.engines for name in group.split(",")}
    problems = [*unknown_choices(("--engines", ENGINES, engines)), *thread_problems(options.threads)]
    if refused("tools.bench.train", problems):
        return 2
    reports = []
    for group in options.engines:
        measured = _measured(group.split(","), raw, batches, options)
        reports.append(_report(raw, options, batches, measured) | {"allocator": allocator_name()})
        print(_table(reports[-1]), flush=True)
    write_report(options.json, reports)
    return 0


def _measured(
    engines: list[str], raw: dict[str, Any], batches: dict[str, list[Batch]], options: argparse.Namespace
) -> list[tuple[bool, Measured]]:
    """The steps of one group of engines."""
    # What is measured: (engine, kind of batch, whether packed).
    ours = [name for name in engines if name.startswith("megatron")]
    cases = [(engine, "equal", engine in ours) for engine in engines]
    mixed = {"none": [], "megatron": ours, "all": engines}[options.mixed]
    cases += [(engine, "mixed", False) for engine in mixed]
    cases += [(engine, "mixed", True) for engine in ours if engine in mixed]
    settings = {"model": raw, "train_ops": options.train_ops, "micro_tokens": options.micro_tokens}
    processes: dict[str, EngineProcess] = {}
    with tempfile.TemporaryDirectory(prefix="bench-train-") as scratch:
        try:
            for name in engines:
                spec = EngineSpec(name, this_python(), settings, is_ours=True)
                processes[name] = EngineProcess(PROGRAM, spec, cpus_for(options.threads), Path(scratch))
            return _in_turns(processes, cases, batches, options.steps)
        finally:
            for process in processes.values():
                process.end()


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.train", description=__doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case, after one warm-up")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step, without padding")
    parser.add_argument("--length", type=int, default=512, help="length of a sequence; the longest one of the mix")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens of a micro-batch, padding included")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--train-ops", default="megatron.core.ops.cpu:cpu_ops", help="our table of ops")
    mixed = "who also steps on mixed lengths, packed (only megatron) and padded (default: megatron)"
    parser.add_argument("--mixed", choices=("none", "megatron", "all"), default="megatron", help=mixed)
    default = "megatron-lean,transformers-bf16"
    groups = f"groups of engines, each comma-separated, of {', '.join(ENGINES)} (default: {default})"
    parser.add_argument("--engines", nargs="+", default=[default], metavar="GROUP", help=groups)
    parser.add_argument("--json", help="also write everything measured to this file")
    return parser


def _in_turns(
    processes: dict[str, EngineProcess], cases: list[tuple[str, str, bool]], batches: dict[str, list[Batch]], steps: int
) -> list[tuple[bool, Measured]]:
    measured = [(is_packed, Measured(processes[engine].name, kind)) for engine, kind, is_packed in cases]
    for step in range(steps + 1):
        for (engine, kind, is_packed), (_, found) in zip(cases, measured, strict=True):
            matmul_peaks = processes[engine].ask("matmul_peaks")
            answer = processes[engine].ask("step", sequences=batches[kind][step].sequences, is_packed=is_packed)
            print(
                f"step {step}: {found.engine}, {kind}{' packed' * is_packed}: {answer['seconds']:.2f} s",
                file=sys.stderr,
            )
            if step:  # the first one warms up
                found.seconds.append(answer["seconds"])
                found.cpu_seconds.append(answer["cpu_seconds"])
                found.losses.append(answer["loss"])
                found.matmul_peaks.append(matmul_peaks)
                found.peak_bytes = max(found.peak_bytes, int(answer["peak_bytes"]))
    return measured


def _report(
    raw: dict[str, Any],
    options: argparse.Namespace,
    batches: dict[str, list[Batch]],
    measured: list[tuple[bool, Measured]],
) -> dict[str, Any]:
    import torch

    hf = parsed(raw)
    rows = []
    for is_packed, found in measured:
        timed = batches[found.batch][1:]
        rates = [batch.num_tokens / s for batch, s in zip(timed, found.seconds, strict=True)]
        flops = [matmul_flops(hf, list(map(len, batch.sequences))) for batch in timed]
        of_peak = [f / s / max(p.values()) for f, s, p in zip(flops, found.seconds, found.matmul_peaks, strict=True)]
        row = asdict(found) | {
            "is_packed": is_packed,
            "tokens_per_s": statistics.median(rates),
            "matmul_use": statistics.median(of_peak),
        }
        rows.append(row | {"tokens_per_cpu_s": sum(b.num_tokens for b in timed) / sum(found.cpu_seconds)})
    every = [peaks for _, found in measured for peaks in found.matmul_peaks]
    peaks = {dtype: statistics.median(peak[dtype] for peak in every) for dtype in every[0]}
    machine = {"cpu": platform.processor() or platform.machine(), "threads": options.threads, "peaks": peaks}
    return {"machine": machine, "torch": torch.__version__, "options": vars(options), "model": raw, "rows": rows}


def _table(report: dict[str, Any]) -> str:
    peaks = ", ".join(f"{dtype} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in report["machine"]["peaks"].items())
    threads = report["machine"]["threads"]
    lines = [
        f"{threads} threads; allocator {report['allocator']}; matmul peak: {peaks}",
        "use: of the higher peak, as it was right before the step; padding is not counted as work",
    ]
    lines.append(f"{'engine':60} {'batch':13} {'tok/s':>8} {'tok/cpu-s':>9} {'use':>6} {'peak GiB':>8} {'loss':>8}")
    for row in report["rows"]:
        batch = row["batch"] + (" packed" if row["is_packed"] else "")
        lines.append(
            f"{row['engine']:60} {batch:13} {row['tokens_per_s']:8.0f} {row['tokens_per_cpu_s']:9.0f} "
            f"{row['matmul_use']:6.1%} {row['peak_bytes'] / 2**30:8.2f} {row['losses'][-1]:8.4f}"
        )
    for row in report["rows"]:
        if row["engine"].startswith("megatron") and row["is_packed"]:
            lines += [_ratios(row, other) for other in report["rows"] if _is_beside(other, row)]
    return "\n".join(lines)


def _is_beside(other: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether ``ours``, which is packed, is compared with ``other``: transformers, or itself padded."""
    is_padded_self = other["engine"] == ours["engine"] and not other["is_packed"]
    return other["batch"] == ours["batch"] and (is_padded_self or not other["engine"].startswith("megatron"))


def _ratios(ours: dict[str, Any], other: dict[str, Any]) -> str:
    quicker, larger = (ours[key] / other[key] for key in ("tokens_per_s", "peak_bytes"))
    pair = f"{ours['engine']}{', packed' * (ours['batch'] == 'mixed')} / {other['engine']}"
    return f"{ours['batch']}: {pair}: {quicker:.2f} x tokens per second, {larger:.2f} x peak memory"


if __name__ == "__main__":
    raise SystemExit(main())
