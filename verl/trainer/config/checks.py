"""Checks of the settings that one choice requires: a schedule, exact log-probs, registered names, the run's length."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from verl.trainer.config.algorithm import AlgorithmSection
from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.schedule import AsyncTrainingConfig
from verl.utils.import_utils import import_external_libs
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.config.reward_model import RewardModelConfig


def schedule_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every setting that contradicts ``trainer.schedule``, with what to set."""
    schedule, models = config.trainer.schedule, config.actor_rollout_ref
    defaults = AsyncTrainingConfig()
    given = [f.name for f in fields(defaults) if getattr(config.async_training, f.name) != getattr(defaults, f.name)]
    if given and schedule != "fully_async":
        yield (
            f"async_training.{', '.join(given)}: only trainer.schedule=fully_async has them, and the schedule is "
            f"{schedule}; leave them out or change it"
        )
    needs, is_apart = f"trainer.schedule={schedule}", config.has_rollout_ranks
    if models.hybrid_engine == is_apart:
        has = "have processes of their own" if is_apart else "share their processes"
        yield (
            f"actor_rollout_ref.hybrid_engine is {models.hybrid_engine}; with {needs} actor and rollout {has}: set it "
            f"{not is_apart}"
        )
    by_load = needs if is_apart else "algorithm.filter_groups.stop_early"
    if models.rollout.rebalance_interval and (is_apart or config.algorithm.filter_groups.stop_early):
        yield (
            f"actor_rollout_ref.rollout.rebalance_interval is {models.rollout.rebalance_interval}; with {by_load} "
            "prompts go to the replica with the fewest samples, set it 0"
        )
    if is_apart:
        yield from _separate_problems(config, needs)
    elif config.rollout.nnodes:
        yield (
            f"rollout.nnodes is {config.rollout.nnodes}, but trainer.schedule is {schedule}, which generates on the "
            "devices of training; set trainer.schedule=one_step_off or fully_async, or rollout.nnodes=0"
        )


def _separate_problems(config: PPOTrainerConfig, needs: str) -> Iterator[str]:
    """Every setting that ranks which only generate do not have."""
    if config.rollout.nnodes == 0:
        yield f"rollout.nnodes is 0; {needs} generates on devices of its own: give their hosts"
    filters, surplus = config.algorithm.filter_groups, config.gen_batch_size - config.data.train_batch_size
    if filters.stop_early and config.async_config.partial_rollout:
        yield (
            f"algorithm.filter_groups.stop_early is True; with {needs} and async_training.partial_rollout=True nothing "
            "is aborted, because unfinished samples continue after a weight sync: leave one of them out"
        )
    elif surplus < 0 or (surplus and not filters.stop_early):
        yield (
            f"data.gen_batch_size is {config.gen_batch_size}; with {needs} prompts are started one by one: leave it "
            "out, or set a larger number than data.train_batch_size with algorithm.filter_groups.stop_early=True"
        )
    if config.data.sampler.class_path is not None:
        yield (
            f"data.sampler is set; with {needs} prompts are taken ahead of the steps, in an order that must not "
            "change: leave it out"
        )
    yield from _pace_problems(config)


def _pace_problems(config: PPOTrainerConfig) -> Iterator[str]:
    schedule, batch = config.async_training, config.data.train_batch_size
    mini, every = config.actor_rollout_ref.actor.ppo_mini_batch_size, schedule.trigger_parameter_sync_step
    if schedule.require_batches is not None and schedule.require_batches * mini != batch:
        yield (
            f"async_training.require_batches {schedule.require_batches} x ppo_mini_batch_size {mini} is not "
            f"data.train_batch_size {batch}, which a step trains on; leave it out"
        )
    for key in ("save_freq", "test_freq"):
        freq = getattr(config.trainer, key)
        if every > 0 and freq > 0 and freq % every:
            yield (
                f"trainer.{key} is {freq}, which async_training.trigger_parameter_sync_step {every} does not divide: "
                "both happen where weights are synced"
            )


def exact_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every setting under which the log-probs of rollout and training could differ by a rounding, with what to set."""
    trainer, models = config.trainer, config.actor_rollout_ref
    if not trainer.exact_log_probs:
        return
    engine, rollout, more = models.actor.megatron, models.rollout, models.actor.megatron.override_transformer_config
    training, generation = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    overrides = f"{training}.override_transformer_config"
    expected: tuple[tuple[str, Mapping[str, Any], str, tuple[Any, ...], str], ...] = (
        ("trainer", trainer, "device", ("auto", "cpu"), "only a CPU has exact ops"),
        ("trainer", trainer, "train_ops", (None,), "exact_log_probs chooses it"),
        ("trainer", trainer, "rollout_ops", (None,), "exact_log_probs chooses it"),
        (training, engine, "tensor_model_parallel_size", (1,), "ranks add in another order"),
        (training, engine, "context_parallel_size", (1,), "ranks add in another order"),
        (training, engine, "expert_tensor_parallel_size", (None, 1), "likewise"),
        (training, engine, "fix_router", (False,), "it routes by the place in the micro-batch"),
        (overrides, more, "moe_router_dtype", ("fp32",), "the rollout routes in float32"),
        (overrides, more, "moe_token_dispatcher_type", ("alltoall",), "the other adds experts rank by rank"),
        (generation, rollout, "fix_router", (False,), "it routes by the place in the step"),
        (generation, rollout, "tensor_model_parallel_size", (1,), "ranks add likewise"),
        (generation, rollout, "dtype", (engine.dtype,), f"{training}.dtype has it"),
        (generation, rollout, "quantization", (None,), "training does not quantise"),
    )
    for where, section, key, allowed, why in expected:
        value = section.get(key, allowed[0])
        if value not in allowed:
            needs = f"trainer.exact_log_probs needs {' or '.join(map(repr, allowed))}"
            yield f"{where}.{key} is {value!r}; {needs}: {why}"
    has_split_experts = rollout.enable_expert_parallel and config.rollout_world_size > 1
    if has_split_experts and rollout.expert_exchange != "dispatch":
        yield (
            f"{generation}.expert_exchange is {rollout.expert_exchange!r}; trainer.exact_log_probs needs 'dispatch', "
            f"which adds a token's experts at home and in order (or {generation}.enable_expert_parallel=False)"
        )
    if rollout.dtype != "float32" and rollout.temperature != 1.0:
        yield (
            f"{generation}.temperature is {rollout.temperature}; with {rollout.dtype} trainer.exact_log_probs needs "
            "1.0: training rounds the divided logits"
        )


def missing_dispatcher(config: PPOTrainerConfig) -> Iterator[str]:
    """Whether the experts' dispatcher ``flex`` lacks its package on this machine; imports nothing."""
    models = config.actor_rollout_ref
    for role, engine in (("actor", models.actor.megatron), ("ref", models.ref.megatron)):
        if engine.has_deep_ep and importlib.util.find_spec("deep_ep") is None:
            yield (
                f"actor_rollout_ref.{role}.megatron.override_transformer_config.moe_token_dispatcher_type is flex, but "
                "deep_ep is not installed here: build DeepEP 1 (github.com/deepseek-ai/DeepEP) on every node, or set "
                "alltoall"
            )
            return


# Estimators that callers with more than a rollout may use, and what a run lacks for them.
NOT_IN_A_RUN = {
    "gae": "needs the values of a critic network, and there is none",
    "remax": "needs the reward of a greedy response to every prompt, which no step samples",
    "optimal_token_baseline": "needs the sum of squared probabilities at every token, which no pass computes",
}


def has_default_names(config: PPOTrainerConfig) -> bool:
    """Whether estimator, policy loss and reward manager are the defaults of their keys."""
    return (
        config.algorithm.adv_estimator == AlgorithmSection.adv_estimator
        and config.actor_rollout_ref.actor.policy_loss.loss_mode == PolicyLossConfig.loss_mode
        and config.reward_model.reward_manager == RewardModelConfig.reward_manager
    )


def registry_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every name that nothing is registered under, after the import of ``actor_rollout_ref.model.external_lib``.

    The registries are imported here because their entries need torch, which importing the config must not. Nor is it
    needed for the defaults, which are registered.
    """
    if has_default_names(config) and not config.actor_rollout_ref.model.external_lib:
        return
    from verl.trainer.ppo.algos import ESTIMATORS
    from verl.trainer.ppo.policy_losses import LOSSES
    from verl.workers.reward_manager import MANAGERS

    models = config.actor_rollout_ref
    estimator = config.algorithm.adv_estimator
    if estimator in NOT_IN_A_RUN:
        others = ", ".join(name for name in ESTIMATORS.names if name not in NOT_IN_A_RUN)
        yield f"algorithm.adv_estimator is {estimator!r}, which {NOT_IN_A_RUN[estimator]}; a run can have {others}"
    try:
        import_external_libs(models.model.external_lib)
    except Exception as error:  # a process edge: the user's code runs here, and may raise anything
        yield f"actor_rollout_ref.model.external_lib is {models.model.external_lib!r}: {type(error).__name__}: {error}"
    for registry, name in (
        (ESTIMATORS, estimator),
        (LOSSES, models.actor.policy_loss.loss_mode),
        (MANAGERS, config.reward_model.reward_manager),
    ):
        is_known = name in (*registry.names, *NOT_IN_A_RUN)
        if not is_known and not (registry is MANAGERS and config.reward_model.manager_spec):
            yield (
                f"{registry.key} is {name!r}; expected one of {', '.join(registry.names)}, or a name that a module of "
                "actor_rollout_ref.model.external_lib registers"
            )
