"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose samples all score the same teach nothing.

A step generates for ``data.gen_batch_size`` prompts at a time until ``data.train_batch_size`` of them are kept. It
trains on the first that many and drops the rest. They are not carried over to the next step, whose policy is another
one: every sample stays on-policy, and no buffer has to be part of a checkpoint.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.scores import reward_parts
from verl.utils.import_utils import load_extern_type
from verl.utils.masks import finite_outside, response_lengths, row_rewards

SEQUENCE_REWARD = "seq_reward"


@dataclass(frozen=True)
class SampleGroup:
    """The scored samples of one prompt.

    Attributes:
        uid: the id of the prompt in this step.
        rewards: the sum over the tokens of each sample with the overlong penalty, float [n].
        parts: the parts of the reward by name, as the reward function gave them, float [n].
        lengths: response tokens of each sample, int [n].
    """

    uid: str
    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    lengths: np.ndarray


# The function of ``algorithm.filter_groups.filter_path``; it returns whether a group is trained on.
GroupFilter = Callable[[PPOTrainerConfig, SampleGroup], bool]


def check_reward_nonzero_std(config: PPOTrainerConfig, group: SampleGroup) -> bool:
    """True when the rewards of a group differ, like slime's filter of this name."""
    return varies(group.rewards)


def varies(values: np.ndarray) -> bool:
    """True when not all are equal; NaN equals nothing."""
    return bool((values != values[0]).any())


def group_filter(config: PPOTrainerConfig) -> Callable[[SampleGroup], bool]:
    """The filter of ``algorithm.filter_groups``; ValueError when its function cannot be loaded."""
    chosen = config.algorithm.filter_groups
    if chosen.filter_path is not None:
        function: GroupFilter = load_filter(chosen.filter_path)
        return lambda group: bool(function(config, group))
    metric = str(chosen.metric)

    def metric_varies(group: SampleGroup) -> bool:
        if metric == SEQUENCE_REWARD:
            return varies(group.rewards)
        if metric not in group.parts:
            raise ValueError(
                f"algorithm.filter_groups.metric is {metric!r}; the reward function gives {', '.join(group.parts)}, "
                f"and {SEQUENCE_REWARD} is the sum of a sample's rewards"
            )
        return varies(group.parts[metric])

    return metric_varies


def load_filter(path: str) -> GroupFilter:
    """The function that ``package.module.name`` or ``file.py:name`` names; ValueError says why there is none."""
    try:
        file, _, name = path.rpartition(":")
        if file:
            function = load_extern_type(file, name)
        else:
            module, _, name = path.rpartition(".")
            function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"algorithm.filter_groups.filter_path is {path!r}: {error}; expected package.module.name or file.py:name"
        ) from error
    if not callable(function):
        raise ValueError(f"algorithm.filter_groups.filter_path is {path!r}, a {type(function).__name__}; no function")
    return function


def groups_of(batch: DataProto) -> list[tuple[SampleGroup, np.ndarray]]:
    """Every prompt's samples and their rows in a scored batch, in order of first appearance."""
    rows_of: dict[str, list[int]] = {}
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        rows_of.setdefault(str(uid), []).append(row)
    mask = batch.batch["response_mask"]
    rewards, lengths = row_rewards(batch.batch["token_level_scores"], mask).numpy(), response_lengths(mask).numpy()
    parts = reward_parts(batch)
    found = []
    for uid, members in rows_of.items():
        rows = np.array(members)
        of_group = {name: values[rows] for name, values in parts.items() if not np.isnan(values[rows]).all()}
        found.append((SampleGroup(uid, rewards[rows], of_group, lengths[rows]), rows))
    return found


def too_few_groups(num_kept: int, num_groups: int, num_seen: int, generations: int | None = None) -> str:
    """What a run says when ``max_num_gen_batches`` is over; without ``generations`` prompts are started one by one."""
    tried = f"{num_seen} prompts" if generations is None else f"{generations} generations"
    return (
        f"{tried} gave {num_kept} of the {num_groups} prompts that a step trains on ({num_seen} tried): most samples "
        "of a prompt score the same. Take prompts that are easier or harder, more samples "
        "(actor_rollout_ref.rollout.n), or raise algorithm.filter_groups.max_num_gen_batches (0 = no limit)"
    )


def collect_groups(
    generate: Callable[[int], DataProto],
    keeps: Callable[[SampleGroup], bool],
    num_groups: int,
    max_num_gen_batches: int,
) -> tuple[DataProto, dict[str, float]]:
    """Returns the rows of the first ``num_groups`` groups that are kept, and metrics of the generations it took.

    Args:
        generate: number of the generation in this step, from 0 -> a scored batch of new prompts.
        max_num_gen_batches: ValueError when so many generations are not enough; 0 = no limit.
    """
    parts: list[DataProto] = []
    num_kept, num_seen, reward_sum, num_samples, generation = 0, 0, 0.0, 0, 0
    while num_kept < num_groups:
        if max_num_gen_batches and generation == max_num_gen_batches:
            raise ValueError(too_few_groups(num_kept, num_groups, num_seen, generation))
        batch = generate(generation)
        groups = groups_of(batch)
        kept = [rows for group, rows in groups if keeps(group)]
        reward_sum += float(finite_outside(batch.batch["token_level_scores"], batch.batch["response_mask"]).sum())
        num_samples, num_seen = num_samples + len(batch), num_seen + len(groups)
        taken = kept[: num_groups - num_kept]
        if taken:
            parts.append(batch.select_idxs(np.concatenate(taken)))
        num_kept, generation = num_kept + len(kept), generation + 1
    metrics = {
        "train/num_gen_batches": float(generation),
        "train/kept_groups_ratio": num_kept / num_seen,
        "train/dropped_surplus_groups": float(num_kept - num_groups),
        "train/reward_before_filter": reward_sum / num_samples,
    }
    return DataProto.concat(parts), metrics
