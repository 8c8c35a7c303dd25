"""The schedules on four processes: synchronous on all four, asynchronous with two that train and two that generate.

    python -m tools.workshop.bench.schedules --output DIR [--rounds 3] [--steps 20] # samples per second
    python -m tools.workshop.bench.schedules --output DIR --score [--rounds 0]       # and the score that each reaches
    python -m tools.workshop.bench.schedules --output DIR --over-sampling 2  # dynamic sampling that stops early

For the rate, prompts have response limits of their own from a heavy tail (Pareto, exponent 1, from ``--shortest`` to
``--longest``) and ignore the end token, so that every schedule generates the same lengths. The schedules take turns; a
round's ratio is of runs next to each other, and the figure is the median. The rate is that of the steps behind the
first ``--filling``, in which an asynchronous run trains on short samples, since the long ones have not ended.

With ``--over-sampling F`` dynamic sampling generates F times a step's prompts, with a filter that keeps every group:
until all have ended, and with ``algorithm.filter_groups.stop_early`` until enough have. The figure is the ratio of the
seconds of ``timing_s/gen``. The groups that are kept then are the shorter ones, as the table shows.

For the score, both train on the arithmetic task with the recipe's settings, from the same base model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from recipes.common.arithmetic import make_set
from recipes.common.base_model import make_base_model
from recipes.r1_zero.json_to_parquet import main as json_to_parquet
from recipes.r1_zero.recipe import CORPUS
from tools.report.run_data import read_jsonl
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.override_text import override
from verl.trainer.ppo.filter_groups import SampleGroup

ROOT = Path(__file__).resolve().parents[3]
CONFIG_DIR, REWARD = ROOT / "recipes/r1_zero/config", ROOT / "recipes/r1_zero/deepscaler.py"
ROLLOUT = "actor_rollout_ref.rollout"
SCORE_SEQUENCES = 64  # a rollout rank decodes so many at a time for the score; more make samples older
SYNC, FULLY_ASYNC = "sync", "fully_async"
# The rollout's log-probs are the old ones, so that a step computes as much in every schedule.
SCHEDULES: dict[str, tuple[str, ...]] = {
    SYNC: ("trainer.n_gpus_per_node=4",),
    FULLY_ASYNC: (
        *("trainer.n_gpus_per_node=2", "rollout.nnodes=1", "rollout.n_gpus_per_node=2"),
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.schedule=fully_async",
        "async_training.keep_kv_cache=True",
        # Four processes share the machine's cores: what generates ahead of need takes them from what trains.
        "async_training.fixed_order=True",
        "algorithm.rollout_correction={bypass_mode:True}",
    ),
}

FILTER = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.filter_path=tools.workshop.bench.schedules.every_group",
)
WAITS, STOPS = "waits for all", "stops early"
SAMPLERS = {
    WAITS: (*SCHEDULES[SYNC], *FILTER),
    STOPS: (*SCHEDULES[SYNC], *FILTER, "algorithm.filter_groups.stop_early=True"),
}


def every_group(config: PPOTrainerConfig, group: SampleGroup) -> bool:
    """A filter that keeps all, so that lengths alone decide how long a generation takes."""
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables that the options ask for."""
    options = _parser().parse_args(argv)
    inputs = make_inputs(options)
    if options.over_sampling:
        compare_samplers(options, inputs)
        return 0
    if options.rounds:
        compare_rates(options, inputs)
    if options.score:
        compare_scores(options, inputs)
    return 0


def make_inputs(options: argparse.Namespace) -> Path:
    """Data and base model, made once: ``data/{train,test}.parquet``, ``long_tail.parquet`` and ``model``."""
    folder: Path = options.output / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "arithmetic.json"
    if not source.is_file():
        source.write_text(json.dumps(make_set(num_problems=2000)))
    json_to_parquet(["--json_path", str(source), "--output_dir", str(folder / "data")])
    train = folder / "data/train.parquet"
    make_base_model(
        CORPUS, train, folder / "model", seed=42, num_steps=options.warmup_steps, batch_size=64, num_processes=1
    )
    write_long_tail(train, folder / "long_tail.parquet", options.shortest, options.longest)
    return folder


def write_long_tail(train: Path, path: Path, shortest: int, longest: int) -> None:
    """The rows of ``train`` with response limits of a heavy tail from ``shortest`` to ``longest`` tokens."""
    import pyarrow as pa

    draw = random.Random(0)
    rows = pq.read_table(train).to_pylist()
    for row in rows:
        row["extra_info"]["max_response_length"] = min(longest, int(shortest / (1.0 - draw.random())))
    pq.write_table(pa.Table.from_pylist(rows), path)


def compare_rates(options: argparse.Namespace, inputs: Path) -> None:
    """Both schedules once a round, in turns; ratios are of the runs of a round."""
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEDULES}
    for round_ in range(options.rounds):
        for name in SCHEDULES:
            directory = options.output / f"rate-{name}-{round_}"
            run(name, directory, inputs, rate_overrides(name, options, inputs), options)
            rates[name].append(rate_of(directory, options.prompts * options.samples, options.filling))
            print(f"round {round_}: {name}: {rates[name][-1]}", flush=True)
    print("| schedule | samples/s | of sync | tokens/s | staleness mean / max | waited for samples |")
    print("|---|---|---|---|---|---|")
    for name in SCHEDULES:
        pairs = zip(rates[name], rates[SYNC], strict=True)
        of_sync = statistics.median(own["samples_per_s"] / sync["samples_per_s"] for own, sync in pairs)
        figure = {key: statistics.median(rate[key] for rate in rates[name]) for key in rates[name][0]}
        oldest = max(rate["max_staleness"] for rate in rates[name])
        print(
            f"| {name} | {figure['samples_per_s']:.1f} | {of_sync:.2f} "
            f"| {figure['tokens_per_s']:,.0f} | {figure['mean_staleness']:.2f} / {oldest:.0f} "
            f"| {figure['wait_share']:.0%} |",
            flush=True,
        )


def compare_samplers(options: argparse.Namespace, inputs: Path) -> None:
    """Over-sampling that waits for all groups and that stops early, in turns; ratios are of the runs of a round."""
    num_prompts = round(options.prompts * options.over_sampling)
    at_once = num_prompts * options.samples // 4  # each of the ranks decodes all of its samples at once
    sizes = (f"data.gen_batch_size={num_prompts}", f"{ROLLOUT}.max_num_seqs={at_once}")
    overrides = [*rate_overrides(SYNC, options, inputs), *sizes]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SAMPLERS}
    for round_ in range(options.rounds):
        for name in SAMPLERS:
            directory = options.output / f"over-sampling-{num_prompts}-{name.split()[0]}-{round_}"
            run(name, directory, inputs, overrides, options)
            steps = read_jsonl(directory / "metrics.jsonl")[1:]  # the first one warms up
            keys = ("timing_s/gen", "response_length/mean", "train/aborted_groups", "train/num_gen_batches")
            found[name].append({key: statistics.mean(step.get(key, 0.0) for step in steps) for key in keys})
            print(f"round {round_}: {name}: {found[name][-1]}", flush=True)
    print("| sampler | s of generation a step | tokens of a trained response | groups aborted | generations |")
    print("|---|---|---|---|---|")
    for name in SAMPLERS:
        figures = [statistics.median(round_[key] for round_ in found[name]) for key in found[name][0]]
        print(f"| {name} | {figures[0]:.2f} | {figures[1]:.1f} | {figures[2]:.1f} | {figures[3]:.1f} |", flush=True)
    pairs = zip(found[WAITS], found[STOPS], strict=True)
    ratios = [waits["timing_s/gen"] / stops["timing_s/gen"] for waits, stops in pairs]
    print(f"stopping early is {statistics.median(ratios):.2f} times as fast", flush=True)


def rate_overrides(name: str, options: argparse.Namespace, inputs: Path) -> list[str]:
    """Long-tailed lengths, nothing but training steps; a synchronous rank decodes all of its samples at once."""
    sequences = options.prompts * options.samples // 4 if name == SYNC else options.sequences
    return [
        override("data.train_files", inputs / "long_tail.parquet"),
        f"data.max_response_length={options.longest}",
        f"data.train_batch_size={options.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={options.prompts}",
        f"{ROLLOUT}.n={options.samples}",
        f"{ROLLOUT}.ignore_eos=True",
        f"{ROLLOUT}.max_num_seqs={sequences}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.test_last=False",
        f"trainer.total_training_steps={options.steps}",
    ]


def compare_scores(options: argparse.Namespace, inputs: Path) -> None:
    """Validation scores after ``--score-steps`` steps of the arithmetic task."""
    overrides = [
        override("data.train_files", inputs / "data/train.parquet"),
        f"{ROLLOUT}.val_kwargs.n=8",
        f"{ROLLOUT}.max_num_seqs={SCORE_SEQUENCES}",
        f"trainer.test_freq={options.score_steps}",
        f"trainer.total_training_steps={options.score_steps}",
    ]
    print("| schedule | score before | after |\n|---|---|---|")
    for name in SCHEDULES:
        directory = options.output / f"score-{name}"
        run(name, directory, inputs, overrides, options)
        scores = [record["val/score"] for record in read_jsonl(directory / "metrics.jsonl") if "val/score" in record]
        print(f"| {name} | {scores[0]:.3f} | {scores[-1]:.3f} |", flush=True)


def run(name: str, directory: Path, inputs: Path, overrides: list[str], options: argparse.Namespace) -> None:
    """One run of the driver, unless ``directory`` has it already.

    Raises:
        ValueError: what is there was made with other settings.
        subprocess.CalledProcessError: the run failed.
    """
    wanted = int(next(item for item in overrides if item.startswith("trainer.total_training_steps=")).split("=")[1])
    bound = [f"async_training.staleness_threshold={options.staleness}"] if name == FULLY_ASYNC else []
    own = [*overrides, *(SCHEDULES | SAMPLERS)[name], *bound, *options.overrides]
    settings = "\n".join(own) + "\n"
    saved, done = directory / "settings.txt", read_jsonl(directory / "metrics.jsonl")
    if done and (not saved.is_file() or saved.read_text() != settings):
        raise ValueError(f"{directory} has a run with other settings (settings.txt): give another --output")
    if done and int(done[-1]["step"]) == wanted:
        return
    directory.mkdir(parents=True, exist_ok=True)
    saved.write_text(settings)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *("--config-dir", str(CONFIG_DIR), "--config-name", "r1_zero_tiny"),
        override("data.val_files", inputs / "data/test.parquet"),
        override("actor_rollout_ref.model.path", inputs / "model"),
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing=False",
        override("custom_reward_function.path", REWARD),
        "reward_model.num_workers=1",
        "ray_kwargs.num_cpus_per_worker=0.25",
        f"{ROLLOUT}.enable_expert_parallel=False",  # replicas that do not wait for each other: the better one for sync
        "ray_kwargs.ray_init.num_cpus=2",
        "trainer.device=cpu",
        f"{ROLLOUT}.quantization=dequantize",  # else rollouts of the FP8 model are quantised, and differ from training
        "trainer.logger=[console]",
        "trainer.save_freq=-1",
        "trainer.save_last=False",
        "trainer.export_hf=False",
        "trainer.resume_mode=disable",
        override("trainer.report_dir", directory),
        *own,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (directory / "command.log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)


def rate_of(directory: Path, samples_per_step: int, filling: int) -> dict[str, float]:
    """What a run did after its first ``filling`` steps; ``wait_share`` is the share of time that waited for samples."""
    steps = read_jsonl(directory / "metrics.jsonl")[filling:]
    seconds = sum(step["timing_s/step"] for step in steps)
    return {
        "samples_per_s": samples_per_step * len(steps) / seconds,
        "tokens_per_s": samples_per_step * sum(step["response_length/mean"] for step in steps) / seconds,
        "max_staleness": max(step.get("schedule/staleness/max", 0.0) for step in steps),
        "mean_staleness": statistics.mean(step.get("schedule/staleness/mean", 0.0) for step in steps),
        "wait_share": sum(step["timing_s/gen"] for step in steps) / seconds,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.bench.schedules", description=__doc__)
    parser.add_argument(
        "--output", type=Path, required=True, help="directory of the inputs and runs; what is there stays"
    )
    parser.add_argument("--rounds", type=int, default=3, help="0: only the score")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run for the rate")
    parser.add_argument("--filling", type=int, default=8, help="first steps, which are not counted")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--shortest", type=int, default=16, help="response, in tokens")
    parser.add_argument("--longest", type=int, default=1024, help="response, in tokens")
    parser.add_argument("--sequences", type=int, default=80, help="sequences that a rollout rank decodes at a time")
    parser.add_argument("--staleness", type=int, default=8, help="bound of fully_async, in versions")
    parser.add_argument("--warmup-steps", type=int, default=350, help="steps that make the base model")
    parser.add_argument("--score", action="store_true", help="train on the arithmetic task too")
    parser.add_argument("--score-steps", type=int, default=20)
    parser.add_argument("--over-sampling", type=float, help="prompts of a generation over those of a step")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value for every run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
