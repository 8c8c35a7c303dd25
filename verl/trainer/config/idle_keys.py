"""Keys that act only beside another setting: without it they are reported as without effect, with that setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.fixed_keys import WithoutEffect

Condition = Callable[[PPOTrainerConfig], Any]
_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
_MODEL, _ENGINE = "actor_rollout_ref.model", f"{_ACTOR}.megatron"
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_STATE = f"{_ACTOR}.optim.override_optimizer_config"
# What the losses and estimators of this repository read; those of a user may read any key.
_LOSSES = frozenset(("vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean"))
_DIVIDE_BY_STD = ("grpo", "grpo_vectorized", "grpo_passk")
_BASELINES = ("rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class IdleRule:
    """Keys, as shell patterns, that change nothing where ``is_idle`` holds, and the reason."""

    keys: tuple[str, ...]
    reason: str
    is_idle: Condition


def idle_keys(config: PPOTrainerConfig, given: Mapping[str, Any]) -> list[WithoutEffect]:
    """Those of the ``given`` keys that change nothing in this run; of several reasons the first one."""
    values = dict(_flat(given))
    found: dict[str, WithoutEffect] = {}
    for rule in IDLE_RULES:
        keys = [key for key in values if key not in found and any(fnmatchcase(key, name) for name in rule.keys)]
        if keys and rule.is_idle(config):
            found |= {key: WithoutEffect(key, values[key], rule.reason) for key in keys}
    return list(found.values())


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Free sections by their keys; None means that a key is not given."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _fills_by_tokens(config: PPOTrainerConfig) -> dict[str, bool]:
    models = config.actor_rollout_ref
    return {
        _ACTOR: models.actor.use_dynamic_bsz,
        _ROLLOUT: models.rollout.log_prob_use_dynamic_bsz,
        _REF: models.ref.log_prob_use_dynamic_bsz,
    }


def _loss_is_not(*names: str) -> Condition:
    return lambda config: config.actor_rollout_ref.actor.policy_loss.loss_mode in _LOSSES.difference(names)


def _has_ratios_of_one(config: PPOTrainerConfig) -> bool:
    """The old log-probs are the update's own."""
    bypasses = config.algorithm.rollout_correction.bypass_mode
    return not config.needs_old_log_prob and not bypasses and _loss_is_not()(config)


def _has_no_old_log_probs(config: PPOTrainerConfig) -> bool:
    return not config.needs_old_log_prob and config.trainer.log_samples_freq <= 0


def _granularity(config: PPOTrainerConfig) -> Any:
    model = config.actor_rollout_ref.model
    given = model.gradient_checkpointing_kwargs.activations_checkpoint_granularity
    return given if model.enable_gradient_checkpointing and given else _override(config, "recompute_granularity")


def _checkpoints_nothing(config: PPOTrainerConfig) -> bool:
    model = config.actor_rollout_ref.model
    given = vars(model.gradient_checkpointing_kwargs).values()
    return model.enable_gradient_checkpointing and all(value is None for value in given)


def _is_random(config: PPOTrainerConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return not (actor.load_weight and actor.megatron.load_weight)


def _override(config: PPOTrainerConfig, key: str) -> Any:
    return config.actor_rollout_ref.actor.megatron.override_transformer_config.get(key)


def _is_precision_aware_for_nothing(config: PPOTrainerConfig) -> bool:
    state = config.actor_rollout_ref.actor.optim.override_optimizer_config
    dtypes = [value for key, value in state.items() if key.endswith("_dtype")]
    return bool(state.get("use_precision_aware_optimizer")) and all(value in (None, "fp32") for value in dtypes)


def _has_no_penalty(config: PPOTrainerConfig) -> bool:
    reward = config.reward_model
    return not reward.contradictions("") and not reward.overlong.enable  # those are problems


_BATCHES = (
    IdleRule((f"{_REF}.*",), "no loss and no reward needs a reference policy", lambda c: not c.use_reference_policy),
    IdleRule((f"{_ROLLOUT}.log_prob_*",), "no old log-probs: a step makes one update", _has_no_old_log_probs),
    *(
        IdleRule((f"{role}.log_prob_{size}",), f"{role}.log_prob_use_dynamic_bsz is {by_tokens}", condition)
        for role in (_ROLLOUT, _REF)
        for size, by_tokens, condition in (
            ("micro_batch_size_per_gpu", True, lambda c, role=role: _fills_by_tokens(c)[role]),
            ("max_token_len_per_gpu", False, lambda c, role=role: not _fills_by_tokens(c)[role]),
        )
    ),
    # The sizes of the other two follow the actor's.
    IdleRule(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",),
        f"{_ACTOR}.use_dynamic_bsz is True",
        lambda c: all(_fills_by_tokens(c).values()),
    ),
    IdleRule(
        (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
        f"{_ACTOR}.use_dynamic_bsz is False",
        lambda c: not any(_fills_by_tokens(c).values()),
    ),
)
_LOSS = (
    IdleRule(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        f"{_ACTOR}.use_kl_loss is False",
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
    ),
    IdleRule(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
        "algorithm.use_kl_in_reward is False",
        lambda c: not c.algorithm.use_kl_in_reward,
    ),
    IdleRule(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        "algorithm.kl_ctrl.type is fixed",
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
    ),
    IdleRule(
        ("algorithm.gamma",),
        "the estimator discounts nothing",
        lambda c: c.algorithm.adv_estimator in (*_DIVIDE_BY_STD, *_BASELINES),
    ),
    IdleRule(
        ("algorithm.norm_adv_by_std_in_grpo",),
        "the estimator is none of GRPO's",
        lambda c: c.algorithm.adv_estimator in (*_BASELINES, "reinforce_plus_plus"),
    ),
    IdleRule((f"{_ACTOR}.clip_ratio_c",), "only the loss vanilla has it", _loss_is_not("vanilla")),
    IdleRule((f"{_ACTOR}.clip_ratio*",), "a step makes one update, so that every ratio is 1", _has_ratios_of_one),
    IdleRule(
        (f"{_ACTOR}.clip_ratio*",),
        "this policy loss clips nothing",
        _loss_is_not(*_LOSSES.difference(("gpg", "kl_cov"))),
    ),
    IdleRule((f"{_ACTOR}.policy_loss.clip_cov_*",), "only the loss clip_cov has it", _loss_is_not("clip_cov")),
    IdleRule(
        (f"{_ACTOR}.policy_loss.kl_cov_ratio", f"{_ACTOR}.policy_loss.ppo_kl_coef"),
        "only the loss kl_cov has it",
        _loss_is_not("kl_cov"),
    ),
    IdleRule(
        (f"{_ACTOR}.data_loader_seed",), f"{_ACTOR}.shuffle is False", lambda c: not c.actor_rollout_ref.actor.shuffle
    ),
    IdleRule(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        "algorithm.rollout_correction has no rollout_is",
        lambda c: (
            not c.algorithm.rollout_correction.rollout_is
            and not (
                c.algorithm.rollout_correction.rollout_rs
                and c.algorithm.rollout_correction.rollout_rs_threshold is None
            )
        ),
    ),
    IdleRule(
        ("algorithm.rollout_correction.rollout_rs_threshold*",),
        "algorithm.rollout_correction has no rollout_rs",
        lambda c: not c.algorithm.rollout_correction.rollout_rs,
    ),
    IdleRule(
        ("algorithm.filter_groups.[!e]*",),
        "algorithm.filter_groups.enable is False",
        lambda c: not c.algorithm.filter_groups.enable,
    ),
)
_TRAINING = (
    IdleRule(
        (f"{_MODEL}.gradient_checkpointing_kwargs.*",),
        f"{_MODEL}.enable_gradient_checkpointing is False",
        lambda c: not c.actor_rollout_ref.model.enable_gradient_checkpointing,
    ),
    IdleRule(
        (f"{_MODEL}.enable_gradient_checkpointing",),
        f"without {_MODEL}.gradient_checkpointing_kwargs, override_transformer_config decides what is recomputed",
        _checkpoints_nothing,
    ),
    IdleRule(
        (f"{_OVERRIDE}.recompute_method", f"{_OVERRIDE}.recompute_num_layers"),
        "recompute_granularity is not full",
        lambda c: _granularity(c) != "full",
    ),
    IdleRule(
        (f"{_OVERRIDE}.recompute_modules",),
        "recompute_granularity is not selective",
        lambda c: _granularity(c) != "selective",
    ),
    IdleRule(
        (f"{_OVERRIDE}.tp_comm_overlap",),
        f"{_ENGINE}.tensor_model_parallel_size is 1",
        lambda c: c.actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1,
    ),
    IdleRule(
        (f"{_OVERRIDE}.cp_comm_type", f"{_OVERRIDE}.cp_send_latents"),
        f"{_ENGINE}.context_parallel_size is 1",
        lambda c: c.actor_rollout_ref.actor.megatron.context_parallel_size == 1,
    ),
    IdleRule(
        (f"{_OVERRIDE}.microbatch_group_size_per_vp_stage",),
        "there are no virtual stages",
        lambda c: (c.actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size or 1) == 1,
    ),
    IdleRule(
        (f"{_OVERRIDE}.mtp_loss_scaling_factor",), "mtp_num_layers is 0", lambda c: not _override(c, "mtp_num_layers")
    ),
    IdleRule(
        (f"{_OVERRIDE}.moe_aux_loss_coeff",),
        "moe_router_load_balancing_type is none",
        lambda c: _override(c, "moe_router_load_balancing_type") == "none" and _override(c, "moe_aux_loss_coeff"),
    ),
    IdleRule(
        (f"{_OVERRIDE}.moe_router_load_balancing_type",),
        "moe_aux_loss_coeff is 0",
        lambda c: not _override(c, "moe_aux_loss_coeff") and _override(c, "moe_router_load_balancing_type") != "none",
    ),
    IdleRule(
        (f"{_ENGINE}.use_dist_checkpointing", f"{_ENGINE}.dist_checkpointing_path"),
        "the weights are initialised at random",
        lambda c: _is_random(c) and c.actor_rollout_ref.actor.megatron.use_dist_checkpointing,
    ),
    IdleRule(
        (f"{_ENGINE}.dist_checkpointing_path",),
        f"{_ENGINE}.use_dist_checkpointing is False",
        lambda c: not c.actor_rollout_ref.actor.megatron.use_dist_checkpointing,
    ),
    IdleRule(
        (f"{_STATE}.pin_cpu_grads", f"{_STATE}.pin_cpu_params"),
        "optimizer_cpu_offload is not True",
        lambda c: not c.actor_rollout_ref.actor.optim.override_optimizer_config.get("optimizer_cpu_offload"),
    ),
    IdleRule(
        (f"{_STATE}.use_precision_aware_optimizer",),
        "all of the optimizer's state is float32",
        _is_precision_aware_for_nothing,
    ),
    IdleRule(
        (f"{_ACTOR}.optim.min_lr", f"{_ACTOR}.optim.lr_decay_steps"),
        f"{_ACTOR}.optim.lr_decay_style is constant",
        lambda c: c.actor_rollout_ref.actor.optim.lr_decay_style == "constant",
    ),
    IdleRule(
        (f"{_ACTOR}.optim.lr_warmup_steps_ratio",),
        f"{_ACTOR}.optim.lr_warmup_steps counts",
        lambda c: c.actor_rollout_ref.actor.optim.lr_warmup_steps >= 0,
    ),
    IdleRule(
        (f"{_ACTOR}.optim.lr_warmup_init",),
        "the learning rate is not warmed up",
        lambda c: c.actor_rollout_ref.actor.optim.warmup_steps(1 << 30) == 0,
    ),
)
_RUN = (
    IdleRule(
        tuple(f"{_ROLLOUT}.val_kwargs.{key}" for key in ("temperature", "top_k", "top_p")),
        f"{_ROLLOUT}.val_kwargs.do_sample is False: the likeliest token is taken",
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
    ),
    IdleRule(
        (
            "reward_model.overlong_buffer.[!e]*",
            "reward_model.reward_kwargs.overlong_buffer_cfg.[!e]*",
            "reward_model.reward_kwargs.max_resp_len",
        ),
        "the overlong buffer is not enabled",
        _has_no_penalty,
    ),
    IdleRule(
        tuple(
            f"reward_model.{key}"
            for key in ("num_workers", "timeout_s", "batch_size", "max_concurrent", "memory_limit_mb")
        ),
        "the reward manager scores in a process of its own",
        lambda c: not c.reward_model.is_pooled,
    ),
    IdleRule(
        ("reward_model.manager_timeout_s",), "the reward manager is a built-in one", lambda c: c.reward_model.is_pooled
    ),
    IdleRule(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs.*"),
        "custom_reward_function.path is empty",
        lambda c: c.custom_reward_function.path is None,
    ),
    IdleRule(
        ("data.max_response_length",),
        f"{_ROLLOUT}.response_length is given, and decides",
        lambda c: c.data.max_response_length != c.actor_rollout_ref.rollout.response_length,
    ),
    IdleRule(("data.seed",), "data.shuffle is False", lambda c: not c.data.shuffle),
    IdleRule(("rollout.n_gpus_per_node",), "rollout.nnodes is 0", lambda c: c.rollout.nnodes == 0),
    IdleRule(
        ("async_training.*",), "trainer.schedule is not fully_async", lambda c: c.trainer.schedule != "fully_async"
    ),
    IdleRule(
        ("trainer.resume_from_path",),
        "trainer.resume_mode is not resume_path",
        lambda c: c.trainer.resume_mode != "resume_path",
    ),
    IdleRule(
        ("trainer.log_samples_rows",), "trainer.log_samples_freq is off", lambda c: c.trainer.log_samples_freq <= 0
    ),
    IdleRule(
        ("trainer.interrupt_grace_s",),
        "trainer.save_on_interrupt is False",
        lambda c: not c.trainer.save_on_interrupt,
    ),
)
IDLE_RULES: tuple[IdleRule, ...] = (*_BATCHES, *_LOSS, *_TRAINING, *_RUN)
