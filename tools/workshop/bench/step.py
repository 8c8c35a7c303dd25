"""``python -m tools.workshop.bench.step``: a whole GRPO step of ours beside one of TRL's GRPOTrainer.

A step generates samples, scores them and updates the policy, without a reference model. In every round each engine has
the machine to itself: a new process with the same CPUs, threads and allocator, one step of warm-up, then the timed ones
on the same prompts. Figures are medians over all rounds. Our update is also compared with the least time for its
products, at the best rate of torch's in the same run. TRL runs in an environment of its own, whose interpreter
``--trl-python`` names, in the variant of attention and experts that is quickest there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.workshop.bench.models import CHECKPOINTS, Work, parsed, update_flops, write_checkpoint
from tools.workshop.bench.options import (
    add_engine_options,
    aligned,
    engine_problems,
    parser_of,
    refused,
    unknown_choices,
    write_report,
)
from tools.workshop.bench.remote import (
    EngineProcess,
    EngineSpec,
    OthersLoad,
    allocator_name,
    cpus_for,
    quickest_variant,
    report_progress,
)
from verl.trainer.config.override_text import override

ENGINES = ("ours", "trl")
PROGRAM, PROBE = "step_engines.py", "rollout_engines.py"
VARIANTS = ("sdpa,grouped_mm", "eager,grouped_mm", "sdpa,eager", "eager,eager")
COLUMNS = {"engine": "<76", "s/step": ">7.2f", "cpu-s": ">7.2f", "peak MB": ">8.0f", "others": ">6.2f", " parts": ""}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options().parse_args(argv)
    if refused("tools.workshop.bench.step", _problems(options)):
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-step-") as tmp:
        report = _run(options, Path(tmp))
    print(_table(report))
    write_report(options.json, report)
    return 0


def _run(options: argparse.Namespace, tmp: Path) -> dict[str, Any]:
    raw, model, cpus = CHECKPOINTS[options.checkpoint], tmp / "model", cpus_for(options.threads)
    write_checkpoint(raw, options.dtype, model)
    shortest, longest = options.prompt_lengths
    work = Work("step", options.num_prompts, shortest, longest, n=options.samples, new_tokens=options.new_tokens)
    steps = [work.prompts(raw["vocab_size"], seed) for seed in range(options.steps + 1)]

    def start(spec: EngineSpec) -> EngineProcess:
        return EngineProcess(PROGRAM, spec, cpus, tmp)

    def second_step(process: EngineProcess) -> float:
        return [process.ask("step", prompts=prompts)["seconds"] for prompts in steps[:2]][-1]

    specs = []
    for engine in options.engines:
        if engine == "ours":
            settings = {"model": str(model), "overrides": _overrides(options, model, tmp)}
            specs.append(EngineSpec(engine, settings, is_ours=True))
            continue
        variants = {variant: _trl(options, model, steps, variant) for variant in options.variants}
        specs.append(quickest_variant(variants, start, second_step))
    rows: list[dict[str, Any]] = [{"engine": spec.engine, "steps": []} for spec in specs]
    rates = []
    for _ in range(options.rounds):
        with EngineProcess(PROBE, EngineSpec("probe", {}), cpus, tmp) as process:
            rates.append(process.ask("measure", num_bytes=1 << 20, dtype=options.dtype)["flops_per_s"])
        for spec, row in zip(specs, rows, strict=True):
            with start(spec) as process:
                row["name"] = process.name
                row["steps"] += _alone(process, steps, work)
    lengths = [[len(prompt) for prompt in prompts] for prompts in steps[1:]]
    flops = median(update_flops(parsed(raw), prompts, options.samples, options.new_tokens) for prompts in lengths)
    return _report(rows, options, flops / median(rates))


def _overrides(options: argparse.Namespace, model: Path, tmp: Path) -> list[str]:
    """The overrides of our config: one worker, one update per batch, everything where it is computed with."""
    models, engine = "actor_rollout_ref", "actor_rollout_ref.actor.megatron"
    return [
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        override("trainer.report_dir", tmp / "run"),
        f"data.max_prompt_length={options.prompt_lengths[1]}",
        f"data.max_response_length={options.new_tokens}",
        f"data.train_batch_size={options.num_prompts}",
        override(f"{models}.model.path", model),
        f"{models}.actor.ppo_mini_batch_size={options.num_prompts}",
        f"{models}.actor.use_dynamic_bsz=True",
        f"{models}.actor.ppo_max_token_len_per_gpu={options.micro_tokens}",
        f"{models}.actor.optim.lr=1e-6",
        f"{engine}.dtype={options.dtype}",
        f"{engine}.param_offload=False",
        f"{engine}.grad_offload=False",
        f"{engine}.optimizer_offload=False",
        f"{models}.rollout.n={options.samples}",
        f"{models}.rollout.dtype={options.dtype}",
        f"{models}.rollout.ignore_eos=True",
        f"{models}.rollout.enforce_eager=False",
        f"{models}.rollout.enable_prefix_caching=True",
        f"{models}.rollout.max_num_seqs={options.num_prompts * options.samples}",
        *options.override,
    ]


def _trl(options: argparse.Namespace, model: Path, steps: list[list[list[int]]], variant: str) -> EngineSpec:
    settings = {
        "model": str(model),
        "dtype": options.dtype,
        "variant": variant.split(","),
        "samples": options.samples,
        "micro_rows": options.trl_micro_rows,
        "new_tokens": options.new_tokens,
        "steps": steps,
    }
    return EngineSpec("trl", settings, options.trl_python)


def _alone(process: EngineProcess, steps: list[list[list[int]]], work: Work) -> list[dict[str, Any]]:
    """The answers to all steps but the first, which warms up."""
    answers = []
    for number, prompts in enumerate(steps):
        load = OthersLoad()
        answer = process.ask("step", prompts=prompts)
        answer["others_cores"] = load.cores(answer["cpu_seconds"])
        expected = work.num_samples * work.new_tokens
        if answer["num_tokens"] != expected:
            raise RuntimeError(f"{process.name} trained on {answer['num_tokens']} new tokens, expected {expected}")
        report_progress(f"step {number}: {process.name}: {answer['seconds']:.2f} s")
        answers.append(answer)
    return answers[1:]


def _report(rows: list[dict[str, Any]], options: argparse.Namespace, least_s: float) -> dict[str, Any]:
    """``least_s``: what the products of our update take at the best rate."""
    for row in rows:
        keys = ("seconds", "cpu_seconds", "others_cores", "generate_seconds", "update_seconds", "reward")
        row |= {key: median(step[key] for step in row["steps"]) for key in keys if key in row["steps"][0]}
        row["peak_bytes"] = max(step["peak_bytes"] for step in row["steps"])
    ratios = {}
    by_engine = {row["engine"]: row for row in rows}
    if by_engine.keys() == set(ENGINES):
        for key in ("seconds", "cpu_seconds", "peak_bytes"):
            ratios[f"{key}: trl / ours"] = by_engine["trl"][key] / by_engine["ours"][key]
    if "ours" in by_engine:
        ratios[f"our update: least time of its products, {least_s:.2f} s, / measured"] = (
            least_s / by_engine["ours"]["update_seconds"]
        )
    return {"options": vars(options), "allocator": allocator_name(), "rows": rows, "ratios": ratios}


def _table(report: dict[str, Any]) -> str:
    options, cells = report["options"], []
    for row in report["rows"]:
        parts = [f"{key.split('_')[0]} {row[key]:.2f}" for key in ("generate_seconds", "update_seconds") if key in row]
        figures = (row["seconds"], row["cpu_seconds"], row["peak_bytes"] / 1e6, row["others_cores"])
        cells.append((row["name"], *figures, " " + ", ".join(parts)))
    lines = [
        f"GRPO step on {options['checkpoint']}, {options['num_prompts']} prompts x {options['samples']} samples x "
        f"{options['new_tokens']} tokens, {options['dtype']}, {options['threads']} threads, allocator "
        f"{report['allocator']}",
        *aligned(COLUMNS, cells),
    ]
    return "\n".join([*lines, *(f"{name}: {value:.2f}" for name, value in report["ratios"].items())])


def _problems(options: argparse.Namespace) -> list[str]:
    problems = engine_problems(options, ENGINES, VARIANTS)
    problems += unknown_choices(("--checkpoint", CHECKPOINTS, [options.checkpoint]))
    rows, micro_rows = options.num_prompts * options.samples, options.trl_micro_rows
    if micro_rows is not None and (micro_rows < 1 or rows % micro_rows):
        problems.append(f"--trl-micro-rows {micro_rows} is no divisor of the step's {rows} samples")
    given = {"--steps": options.steps, "--rounds": options.rounds}
    return problems + [f"{name} must be at least 1" for name, value in given.items() if value < 1]


def _options() -> argparse.ArgumentParser:
    parser = parser_of("step", __doc__)
    add_engine_options(parser, ENGINES, ("ours",), "float32", VARIANTS)
    parser.add_argument("--checkpoint", "--model", default="C", help=f"of {', '.join(CHECKPOINTS)} (default: C)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round, after one warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine, one after the other")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="packed tokens of one of our micro-batches")
    text = "samples of one of TRL's micro-batches, where the whole step does not fit (default: all)"
    parser.add_argument("--trl-micro-rows", type=int, help=text)
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="more of our config")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
