"""Checks of the settings that each ``trainer.schedule`` requires."""

from __future__ import annotations

from dataclasses import fields

from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.schedule import AsyncTrainingConfig


def schedule_problems(config: PPOTrainerConfig) -> list[str]:
    """Every setting that contradicts ``trainer.schedule``, with what to set."""
    schedule, models = config.trainer.schedule, config.actor_rollout_ref
    found = [*config.rollout.problems("rollout"), *config.async_training.problems("async_training")]
    defaults = AsyncTrainingConfig()
    given = [f.name for f in fields(defaults) if getattr(config.async_training, f.name) != getattr(defaults, f.name)]
    if given and schedule != "fully_async":
        found.append(
            f"async_training.{', '.join(given)}: only trainer.schedule=fully_async has them, and the schedule is "
            f"{schedule}; leave them out or change it"
        )
    if not config.has_rollout_ranks:
        if config.rollout.nnodes:
            found.append(
                f"rollout.nnodes is {config.rollout.nnodes}, but trainer.schedule is {schedule}, which generates on "
                "the devices of training; set trainer.schedule=one_step_off or fully_async, or rollout.nnodes=0"
            )
        if not models.hybrid_engine:
            found.append(
                "actor_rollout_ref.hybrid_engine is False; with trainer.schedule=sync actor and rollout share their "
                "processes"
            )
        return found
    needs = f"trainer.schedule={schedule}"
    if config.rollout.nnodes == 0:
        found.append(f"rollout.nnodes is 0; {needs} generates on devices of its own: give their hosts")
    if models.hybrid_engine:
        found.append(
            f"actor_rollout_ref.hybrid_engine is True; with {needs} actor and rollout have processes of their own: set "
            "it False"
        )
    if config.algorithm.filter_groups.enable:
        found.append(f"algorithm.filter_groups.enable is True; dynamic sampling is not there with {needs}")
    if models.rollout.rebalance_interval:
        found.append(
            f"actor_rollout_ref.rollout.rebalance_interval is {models.rollout.rebalance_interval}; with {needs} "
            "prompts go to the replica with the fewest samples, set it 0"
        )
    return found + _pace_problems(config)


def _pace_problems(config: PPOTrainerConfig) -> list[str]:
    schedule, batch = config.async_training, config.data.train_batch_size
    mini, every, found = config.actor_rollout_ref.actor.ppo_mini_batch_size, schedule.trigger_parameter_sync_step, []
    if schedule.require_batches is not None and schedule.require_batches * mini != batch:
        found.append(
            f"async_training.require_batches {schedule.require_batches} x ppo_mini_batch_size {mini} is not "
            f"data.train_batch_size {batch}, which a step trains on; leave it out"
        )
    for key in ("save_freq", "test_freq"):
        freq = getattr(config.trainer, key)
        if every > 0 and freq > 0 and freq % every:
            found.append(
                f"trainer.{key} is {freq}, which async_training.trigger_parameter_sync_step {every} does not divide: "
                "both happen where weights are synced"
            )
    return found
