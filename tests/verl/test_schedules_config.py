"""What the schedules ask of the rest of the config is said before anything starts, all of it at once."""

from __future__ import annotations

import pytest

from verl.trainer.config import PPOTrainerConfig, config_warnings, load_config, validate_config

SEPARATE = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=2")
ASYNC = (*SEPARATE, "trainer.schedule=fully_async")


def config(*overrides: str) -> PPOTrainerConfig:
    sizes = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    return load_config([*sizes, "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *overrides])


@pytest.mark.parametrize("schedule", ["one_step_off", "fully_async"])
def test_a_schedule_with_its_ranks_is_fine(schedule: str) -> None:
    chosen = config(*SEPARATE, f"trainer.schedule={schedule}", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert validate_config(chosen) == []
    assert chosen.rollout_world_size == 2 and chosen.rollout_replicas == 1 and chosen.num_devices == 4
    assert config().rollout_world_size == config().num_devices == 2


def test_one_step_off_is_a_pace_of_its_own() -> None:
    schedule = config(*SEPARATE, "trainer.schedule=one_step_off").async_config
    assert schedule.max_staleness == 1 and schedule.fixed_order and not schedule.partial_rollout
    assert config(*ASYNC, "async_training.staleness_threshold=1.2").async_config.max_staleness == 2


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("trainer.schedule=later",), "trainer.schedule is 'later'; expected one of sync, one_step_off, fully_async"),
        (("rollout.nnodes=1",), "rollout.nnodes is 1, but trainer.schedule is sync"),
        (("actor_rollout_ref.hybrid_engine=False",), "hybrid_engine is False; with trainer.schedule=sync"),
        (
            ("async_training.partial_rollout=False",),
            "async_training.partial_rollout: only trainer.schedule=fully_async",
        ),
        (("trainer.schedule=fully_async",), "rollout.nnodes is 0; trainer.schedule=fully_async generates on devices"),
        (("trainer.schedule=fully_async",), "hybrid_engine is True; with trainer.schedule=fully_async"),
        ((*ASYNC, "rollout.n_gpus_per_node=0"), "rollout.n_gpus_per_node is 0; it must be at least 1"),
        ((*ASYNC, "async_training.staleness_threshold=-1"), "staleness_threshold is -1.0; give a share"),
        ((*ASYNC, "async_training.steps_per_call=0"), "async_training.steps_per_call is 0; it must be at least 1"),
        (
            (*ASYNC, "async_training.keep_kv_cache=True", "async_training.partial_rollout=False"),
            "keep_kv_cache is True and partial_rollout False: no sample continues over a weight sync",
        ),
        ((*ASYNC, "async_training.require_batches=3"), "require_batches 3 x ppo_mini_batch_size 4 is not"),
        (
            (*ASYNC, "async_training.trigger_parameter_sync_step=2", "trainer.save_freq=3"),
            "trainer.save_freq is 3, which async_training.trigger_parameter_sync_step 2 does not divide",
        ),
        ((*ASYNC, "actor_rollout_ref.rollout.rebalance_interval=8"), "rebalance_interval is 8; with trainer.schedule"),
        (
            (*ASYNC, "actor_rollout_ref.rollout.tensor_model_parallel_size=4"),
            "it must divide the 2 devices of rollout.nnodes x rollout.n_gpus_per_node",
        ),
    ],
)
def test_what_does_not_go_together_is_said(overrides: tuple[str, ...], expected: str) -> None:
    problems = validate_config(config(*overrides))
    assert any(expected in problem for problem in problems), problems


def test_all_problems_come_together() -> None:
    problems = validate_config(config("trainer.schedule=one_step_off", "async_training.fixed_order=True"))
    assert len(problems) == 3


def test_stale_samples_without_a_correction_are_warned_of() -> None:
    said = "samples may be 1 weight syncs old, and nothing corrects for that"
    assert any(said in warning for warning in config_warnings(config(*ASYNC)))
    for correction in ("{rollout_is:token}", "{bypass_mode:True}"):
        chosen = config(*ASYNC, f"algorithm.rollout_correction={correction}")
        assert not any(said in warning for warning in config_warnings(chosen))
