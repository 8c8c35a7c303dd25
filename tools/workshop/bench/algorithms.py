"""Each algorithm on the arithmetic task: after how many steps it reaches the score that GRPO has after 20.

    python -m tools.workshop.bench.algorithms --output DIR [--steps 20] [--most-steps 60] [--seeds 1] [NAME ...]

Runs the recipe's command once per algorithm, one after another, GRPO first: its stages make the data and the base model
that the others take. After ``--steps`` steps whoever has not reached GRPO's score of then goes on from its checkpoint,
``--steps`` more at a time, until it has or ``--most-steps`` are over. What is there is not run again.

The score is that of 300 held-out problems, eight samples each, after every ``--every`` steps, and its mean over runs
with ``--seeds`` seeds of the rollout, since runs that differ only in those differ too. An algorithm with an FP8 rollout
is validated by it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.report.run_data import read_jsonl

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "recipes" / "r1_zero" / "ray_start_grpo_npu.sh"
BASELINE = "grpo"
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"

# What an algorithm adds to the recipe's config, which is GRPO with 64 prompts x 8 samples; several updates per rollout
# where there would be nothing to clip without, and a quantised rollout where there would be nothing to correct.
TWO_UPDATES = f"{ACTOR}.ppo_mini_batch_size=32"
FP8_ROLLOUT = "actor_rollout_ref.rollout.quantization=fp8"
ALGORITHMS: dict[str, tuple[str, ...]] = {
    BASELINE: (),
    "grpo_2_updates": (TWO_UPDATES,),
    "dr_grpo": ("algorithm.norm_adv_by_std_in_grpo=False", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    "dapo": (
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.use_kl_loss=False",
        "reward_model.overlong_buffer={enable:True,len:16,penalty_factor:0.5,log:True}",
        "algorithm.filter_groups={enable:True,metric:score}",
        TWO_UPDATES,
    ),
    "gspo": (f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", TWO_UPDATES),
    "cispo": (
        f"{ACTOR}.policy_loss.loss_mode=cispo",
        f"{ACTOR}.clip_ratio_low=1.0",
        f"{ACTOR}.clip_ratio_high=0.28",
        TWO_UPDATES,
    ),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("algorithm.adv_estimator=reinforce_plus_plus_baseline",),
    "kl_in_reward": (f"{ACTOR}.use_kl_loss=False", "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=k1"),
    "tis": (FP8_ROLLOUT, f"{CORRECTION}={{rollout_is:token,rollout_is_threshold:2}}"),
    "mis": (
        FP8_ROLLOUT,
        f"{CORRECTION}={{rollout_is:sequence,rollout_rs:sequence,rollout_rs_threshold:2,rollout_rs_threshold_lower:0}}",
    ),
    "icepop": (
        FP8_ROLLOUT,
        f"{CORRECTION}={{rollout_is:token,rollout_is_threshold:5,rollout_rs:token,rollout_rs_threshold:5,"
        "rollout_rs_threshold_lower:0.5}",
    ),
    "bypass": (FP8_ROLLOUT, f"{CORRECTION}.bypass_mode=True", TWO_UPDATES),
    "grpo_fp8": (FP8_ROLLOUT,),
    "r3": ("actor_rollout_ref.rollout.enable_rollout_routing_replay=True", f"{ACTOR}.router_replay.mode=R3"),
}
MEASURED = ("actor_rollout_ref.rollout.val_kwargs.n=8", "trainer.save_freq=-1", "trainer.export_hf=False")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print a table; 1 when an algorithm does not reach GRPO's score in ``--most-steps``."""
    options = _parser().parse_args(argv)
    unknown = [name for name in options.names if name not in ALGORITHMS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}", file=sys.stderr)
        return 2
    if options.steps % options.every or options.most_steps % options.steps:
        print("--steps must be a multiple of --every, and --most-steps of --steps", file=sys.stderr)
        return 2
    target = mean_scores(BASELINE, options, options.steps)[options.steps]
    print(f"{BASELINE} after {options.steps} steps, mean of {options.seeds} seeds: {target:.3f}", flush=True)
    print(f"| algorithm | before | after {options.steps} steps | less GRPO's | reached GRPO's after | score then |")
    print("|---|---|---|---|---|---|")
    is_reached = []
    for name in (name for name in options.names or ALGORITHMS if name != BASELINE):
        scores: dict[int, float] = {}
        for steps in range(options.steps, options.most_steps + 1, options.steps):
            scores = mean_scores(name, options, steps)
            if max(scores.values()) >= target:
                break
        print(row(name, scores, options.steps, target), flush=True)
        is_reached.append(max(scores.values()) >= target)
    return int(not all(is_reached))


def row(name: str, scores: dict[int, float], steps: int, target: float) -> str:
    """A line of the table, from mean scores by step."""
    after, last = scores[steps], max(scores)
    first = min((step for step, score in scores.items() if score >= target), default=None)
    when = f"not in {last} | {scores[last]:.3f}" if first is None else f"{first} steps | {scores[first]:.3f}"
    return f"| {name} | {scores[0]:.3f} | {after:.3f} | {after - target:+.3f} | {when} |"


def mean_scores(name: str, options: argparse.Namespace, steps: int) -> dict[int, float]:
    """Step -> validation score, the mean over the seeds, of runs of ``steps`` steps, made unless they are there."""
    of_seeds = [run(name, options.output, steps, seed, options.every) for seed in range(options.seeds)]
    common = set.intersection(*(set(scores) for scores in of_seeds))
    return {step: statistics.mean(scores[step] for scores in of_seeds) for step in sorted(common)}


def run(name: str, output: Path, steps: int, seed: int, every: int) -> dict[int, float]:
    """Step -> validation score up to ``steps`` of a run of the recipe, which is started or continued where needed.

    Raises:
        subprocess.CalledProcessError: the run failed.
        ValueError: scores of its first or last step are missing.
    """
    directory = output / (f"{name}-seed{seed}" if seed else name)
    records = read_jsonl(directory / "metrics.jsonl")
    if not records or records[-1]["step"] < steps:
        directory.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OUTPUT_DIR": str(directory), "STEPS": str(steps)}
        if directory != output / BASELINE:
            environment["MODEL_PATH"] = str(output / BASELINE / "base_model_fp8")
        overrides = [*ALGORITHMS[name], *MEASURED, f"trainer.test_freq={every}"]
        if seed:
            overrides.append(f"actor_rollout_ref.rollout.seed={seed}")
        with (directory / "command.log").open("a") as log:
            subprocess.run(["bash", str(SCRIPT), *overrides], env=environment, stdout=log, stderr=log, check=True)
        records = read_jsonl(directory / "metrics.jsonl")
    scores = {int(record["step"]): record["val/score"] for record in records if "val/score" in record}
    if not {0, steps} <= scores.keys():
        raise ValueError(f"{directory} has validation scores of steps {sorted(scores)}; expected 0 and {steps}")
    return {step: score for step, score in scores.items() if step <= steps}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.bench.algorithms", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory of the runs, one folder each")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--most-steps", type=int, default=60, help="an algorithm's limit to reach GRPO's score")
    parser.add_argument("--every", type=int, default=4, help="steps between two validations")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each algorithm")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALGORITHMS)}; default: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
