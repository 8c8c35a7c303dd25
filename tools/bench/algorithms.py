"""Each algorithm on the arithmetic task: the score it reaches in as many steps as GRPO, from the same base model.

    python -m tools.bench.algorithms --output DIR [--steps 20] [--seeds 1] [NAME ...]

Runs the recipe's command once per algorithm, one after another, GRPO first: its stages make the data and the base model
that the others take. A run that is there is not run again. About two minutes each on two cores, and two for the base
model. The score is that of 300 held-out problems, eight samples each, and its mean over runs with ``--seeds`` seeds of
the rollout, since runs that differ only in those differ too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    "gspo": (
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        TWO_UPDATES,
    ),
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
    """Runs what is missing, prints a table; 1 when an algorithm stays more than ``--margin`` below GRPO."""
    options = _parser().parse_args(argv)
    unknown = [name for name in options.names if name not in ALGORITHMS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(ALGORITHMS)}", file=sys.stderr)
        return 2
    names = [BASELINE, *(name for name in options.names or ALGORITHMS if name != BASELINE)]
    reached = {}
    for name in names:
        scores = [run(name, options.output, options.steps, seed) for seed in range(options.seeds)]
        reached[name] = (
            sum(before for before, _ in scores) / len(scores),
            sum(after for _, after in scores) / len(scores),
        )
    of_grpo = reached[BASELINE][1]
    print("| algorithm | validation score before | after | less GRPO's |\n|---|---|---|---|")
    for name, (before, after) in reached.items():
        print(f"| {name} | {before:.3f} | {after:.3f} | {after - of_grpo:+.3f} |")
    return int(any(after < of_grpo - options.margin for _, after in reached.values()))


def run(name: str, output: Path, steps: int, seed: int) -> tuple[float, float]:
    """Scores of a run of the recipe, made unless it is there; CalledProcessError when it fails."""
    directory = output / (f"{name}-seed{seed}" if seed else name)
    if final_step(directory) == steps:
        return final_scores(directory, steps)
    directory.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OUTPUT_DIR": str(directory), "STEPS": str(steps)}
    if directory != output / BASELINE:
        made = output / BASELINE
        environment |= {"MODEL_PATH": str(made / "base_model_fp8")}
    overrides = [*ALGORITHMS[name], *MEASURED, f"trainer.test_freq={steps}"]
    if seed:
        overrides.append(f"actor_rollout_ref.rollout.seed={seed}")
    with (directory / "command.log").open("w") as log:
        subprocess.run(["bash", str(SCRIPT), *overrides], env=environment, stdout=log, stderr=log, check=True)
    return final_scores(directory, steps)


def final_step(directory: Path) -> int:
    """The last step in the metrics of a run; -1 when there are none."""
    records = _records(directory)
    return int(records[-1]["step"]) if records else -1


def final_scores(directory: Path, steps: int) -> tuple[float, float]:
    """Validation score before the first and after the last step; ValueError when the run has none."""
    scores = {int(record["step"]): record["val/score"] for record in _records(directory) if "val/score" in record}
    if not {0, steps} <= scores.keys():
        raise ValueError(f"{directory} has validation scores of steps {sorted(scores)}; expected 0 and {steps}")
    return scores[0], scores[steps]


def _records(directory: Path) -> list[dict[str, float]]:
    path = directory / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.algorithms", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory of the runs, one folder each")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each algorithm")
    parser.add_argument("--margin", type=float, default=0.03, help="how far below GRPO's score is still a draw")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALGORITHMS)}; default: all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
