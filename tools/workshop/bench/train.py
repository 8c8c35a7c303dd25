"""``python -m tools.workshop.bench.train``: tokens per second, memory and use of the peak, beside transformers.

Every engine lives in a process of its own with the same CPUs, threads and allocator; the engines of a group are alive
together and take their steps in turns on the same sequences of equal length, so that whatever else the machine does
meets all of them. Figures are medians; ratios are of medians within a group. At the default size the default group, all
in bf16, needs 18 GiB; one with fp32 weights needs 26 GiB (``--num-layers 4`` makes that 14).
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from tools.workshop.bench.models import Batch, matmul_flops, parsed, random_batch, small_config
from tools.workshop.bench.options import aligned, parser_of, refused, thread_problems, unknown_choices, write_report
from tools.workshop.bench.remote import EngineProcess, EngineSpec, allocator_name, cpus_for, report_progress

ENGINES = ("megatron-lean", "megatron-fp32", "transformers-bf16", "transformers-fp32")
PROGRAM = "train_engines.py"
COLUMNS = {
    "engine": "<60",
    "tok/s": ">8.0f",
    "tok/cpu-s": ">9.0f",
    "use": ">6.1%",
    "peak GiB": ">8.2f",
    "loss": ">8.4f",
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options().parse_args(argv)
    engines = {name for group in options.engines for name in group.split(",")}
    problems = [*unknown_choices(("--engines", ENGINES, engines)), *thread_problems(options.threads)]
    if refused("tools.workshop.bench.train", problems):
        return 2
    raw = small_config(options.hidden_size, options.num_layers, options.num_experts, options.vocab_size)
    lengths = [options.length] * max(1, options.tokens // options.length)
    batches = [random_batch(lengths, options.vocab_size, step) for step in range(options.steps + 1)]
    reports = []
    for group in options.engines:
        rows = _measured(group.split(","), raw, batches, options)
        reports.append(_report(raw, options, batches[1:], rows))
        print(_table(reports[-1]), flush=True)
    write_report(options.json, reports)
    return 0


def _options() -> argparse.ArgumentParser:
    parser = parser_of("train", __doc__)
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each engine, after one warm-up")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--length", type=int, default=512, help="length of a sequence")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--train-ops", default="megatron.core.ops.cpu:cpu_ops", help="our table of ops")
    default = "megatron-lean,transformers-bf16"
    groups = f"groups of engines, each comma-separated, of {', '.join(ENGINES)} (default: {default})"
    parser.add_argument("--engines", nargs="+", default=[default], metavar="GROUP", help=groups)
    return parser


def _measured(
    engines: list[str], raw: dict[str, Any], batches: list[Batch], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The timed steps of one group of engines, a row for each; the first step warms up.

    ``matmul_peaks`` are floating-point operations per second of large matmuls by dtype, right before each step.
    """
    settings = {"model": raw, "train_ops": options.train_ops, "micro_tokens": options.micro_tokens}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-train-")))
        specs = [EngineSpec(engine, settings, is_ours=True) for engine in engines]
        started = (EngineProcess(PROGRAM, spec, cpus_for(options.threads), scratch) for spec in specs)
        processes = [stack.enter_context(process) for process in started]
        rows: list[dict[str, Any]] = [{"engine": process.name, "answers": []} for process in processes]
        for step, batch in enumerate(batches):
            for process, row in zip(processes, rows, strict=True):
                peaks = process.ask("matmul_peaks") if step else {}
                answer = process.ask("step", sequences=batch.sequences)
                report_progress(f"step {step}: {row['engine']}: {answer['seconds']:.2f} s")
                if step:
                    row["answers"].append(answer | {"matmul_peaks": peaks})
    return rows


def _report(
    raw: dict[str, Any], options: argparse.Namespace, timed: list[Batch], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    import torch

    flops = [matmul_flops(parsed(raw), list(map(len, batch.sequences))) for batch in timed]
    for row in rows:
        answers = row.pop("answers")
        row["seconds"], row["cpu_seconds"], row["losses"], row["matmul_peaks"] = (
            [answer[key] for answer in answers] for key in ("seconds", "cpu_seconds", "loss", "matmul_peaks")
        )
        row["peak_bytes"] = max(int(answer["peak_bytes"]) for answer in answers)
        row["tokens_per_s"] = median(b.num_tokens / s for b, s in zip(timed, row["seconds"], strict=True))
        row["tokens_per_cpu_s"] = sum(batch.num_tokens for batch in timed) / sum(row["cpu_seconds"])
        used = zip(flops, row["seconds"], row["matmul_peaks"], strict=True)
        is_fp32 = " fp32" in row["engine"] and "moments" not in row["engine"]
        row["matmul_use"] = median(
            f / s / (peaks["float32"] if is_fp32 else max(peaks.values())) for f, s, peaks in used
        )
    every = [peaks for row in rows for peaks in row["matmul_peaks"]]
    peaks = {dtype: median(peak[dtype] for peak in every) for dtype in every[0]}
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": options.threads, "peaks": peaks},
        "torch": torch.__version__,
        "options": vars(options),
        "model": raw,
        "rows": rows,
        "allocator": allocator_name(),
    }


def _table(report: dict[str, Any]) -> str:
    machine, rows = report["machine"], report["rows"]
    peaks = ", ".join(f"{dtype} {peak / 1e9:.0f} GFLOP/s" for dtype, peak in machine["peaks"].items())
    keys = ("tokens_per_s", "tokens_per_cpu_s", "matmul_use")
    cells = [(row["engine"], *(row[key] for key in keys), row["peak_bytes"] / 2**30, row["losses"][-1]) for row in rows]
    ours, others = ([row for row in rows if row["engine"].startswith("megatron") is own] for own in (True, False))
    return "\n".join(
        [
            f"{machine['threads']} threads; allocator {report['allocator']}; matmul peak: {peaks}",
            "use: share of the higher peak (fp32 engines: of fp32's) right before the step",
            *aligned(COLUMNS, cells),
            *(_ratios(row, other) for row in ours for other in others),
        ]
    )


def _ratios(ours: dict[str, Any], other: dict[str, Any]) -> str:
    quicker, larger = (ours[key] / other[key] for key in ("tokens_per_s", "peak_bytes"))
    pair = f"{ours['engine']} / {other['engine']}"
    return f"{pair}: {quicker:.2f} x tokens per second, {larger:.2f} x peak memory"


if __name__ == "__main__":
    raise SystemExit(main())
