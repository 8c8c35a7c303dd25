"""Config of the schedules: which devices generate when, and how old a sample may be when it is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from verl.workers.config.keys import Section, Values, at_least, beside, key

SCHEDULES = ("sync", "one_step_off", "fully_async")


@dataclass(frozen=True)
class RolloutRanksConfig(Section):
    """Devices that only generate, beside those of ``trainer`` that train (as in verl's one_step_off_policy recipe)."""

    #: hosts of rollout ranks; 0 means that generation shares the devices of training.
    nnodes: int = key(
        0,
        Values("give a number of hosts, or 0 for none", lambda value: value >= 0),
        names={"0.9.0": "../actor_rollout_ref.rollout.nnodes"},
    )
    #: rollout ranks on each of these hosts.
    n_gpus_per_node: int = key(
        8, at_least(1), beside("nnodes", 0), names={"0.9.0": "../actor_rollout_ref.rollout.n_gpus_per_node"}
    )

    @property
    def world_size(self) -> int:
        return self.nnodes * self.n_gpus_per_node


@dataclass(frozen=True)
class AsyncTrainingConfig(Section):
    """How far generation runs ahead with ``trainer.schedule=fully_async`` (as in verl's fully_async_policy recipe)."""

    #: how many prompts may be started before the weights that they train, as a share of the prompts between two weight
    #: syncs; 0.5 is half of them. No token that is trained on is older than this many syncs, rounded up.
    staleness_threshold: float = key(
        1.0, Values("give a share of the prompts between two syncs, 0 or more", lambda value: 0 <= value < math.inf)
    )
    trigger_parameter_sync_step: int = key(1, at_least(1))  #: steps between two weight syncs.
    #: mini-batches that a step waits for and trains on; absent means that ``data.train_batch_size`` and
    #: ``actor_rollout_ref.actor.ppo_mini_batch_size`` decide, with which it must agree.
    require_batches: int | None = key(None, at_least(1))
    #: a weight sync interrupts generation, which continues with the new weights; with False the sync waits until the
    #: running samples have ended.
    partial_rollout: bool = True
    #: an interrupted sample continues on the cache that the older weights computed (2509.19128); with False the cache
    #: is computed anew.
    keep_kv_cache: bool = False
    #: engine steps of one call to the rollout ranks, so the most that a weight sync waits for.
    steps_per_call: int = key(16, at_least(1))
    #: the order of events depends on counts and never on a clock, so that equal runs have equal bits; generation then
    #: stops when the samples of the next step are complete.
    fixed_order: bool = False

    @property
    def max_staleness(self) -> int:
        """Weight syncs by which the oldest token of a sample may be behind the weights that it trains."""
        return math.ceil(self.staleness_threshold)

    def contradictions(self, where: str) -> Iterator[str]:
        if self.keep_kv_cache and not self.partial_rollout:
            yield (
                f"{where}.keep_kv_cache is True and partial_rollout False: no sample continues over a weight sync; "
                "leave one of them out"
            )


# One-step-off: while a step trains, the whole next batch is generated with the weights from before the step.
ONE_STEP_OFF = AsyncTrainingConfig(staleness_threshold=1.0, partial_rollout=False, fixed_order=True)
