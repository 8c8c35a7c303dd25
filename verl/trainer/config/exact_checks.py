"""Checks of the settings that ``trainer.exact_log_probs`` requires."""

from __future__ import annotations

from verl.trainer.config.config import PPOTrainerConfig


def exact_problems(config: PPOTrainerConfig) -> list[str]:
    """Every setting under which the log-probs of rollout and training could differ by a rounding, with what to set."""
    trainer, models = config.trainer, config.actor_rollout_ref
    if not trainer.exact_log_probs:
        return []
    engine, rollout = models.actor.megatron, models.rollout
    overrides = engine.override_transformer_config
    actor, generation = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
    expected = (
        ("trainer.device", trainer.device, ("auto", "cpu"), "only a CPU has exact ops"),
        ("trainer.train_ops", trainer.train_ops, (None,), "exact_log_probs chooses it"),
        ("trainer.rollout_ops", trainer.rollout_ops, (None,), "exact_log_probs chooses it"),
        (f"{actor}.tensor_model_parallel_size", engine.tensor_model_parallel_size, (1,), "ranks add in another order"),
        (f"{actor}.context_parallel_size", engine.context_parallel_size, (1,), "ranks add in another order"),
        (f"{actor}.expert_tensor_parallel_size", engine.expert_tensor_parallel_size, (None, 1), "likewise"),
        (f"{actor}.fix_router", engine.fix_router, (False,), "it routes by the place in the micro-batch"),
        (
            f"{actor}.override_transformer_config.moe_router_dtype",
            overrides.get("moe_router_dtype", "fp32"),
            ("fp32",),
            "the rollout routes in float32",
        ),
        (
            f"{actor}.override_transformer_config.moe_token_dispatcher_type",
            overrides.get("moe_token_dispatcher_type", "alltoall"),
            ("alltoall",),
            "the other adds experts rank by rank",
        ),
        (f"{generation}.fix_router", rollout.fix_router, (False,), "it routes by the place in the step"),
        (f"{generation}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, (1,), "ranks add likewise"),
        (f"{generation}.dtype", rollout.dtype, (engine.dtype,), f"{actor}.dtype has it"),
        (f"{generation}.quantization", rollout.quantization, (None,), "training does not quantise"),
    )
    found = [
        f"{key} is {value!r}; trainer.exact_log_probs needs {' or '.join(map(repr, allowed))}: {why}"
        for key, value, allowed, why in expected
        if value not in allowed
    ]
    has_split_experts = rollout.enable_expert_parallel and config.rollout_world_size > 1
    if has_split_experts and rollout.expert_exchange != "dispatch":
        found.append(
            f"{generation}.expert_exchange is {rollout.expert_exchange!r}; trainer.exact_log_probs needs 'dispatch', "
            f"which adds a token's experts at home and in order (or {generation}.enable_expert_parallel=False)"
        )
    if rollout.dtype != "float32" and rollout.temperature != 1.0:
        found.append(
            f"{generation}.temperature is {rollout.temperature}; with {rollout.dtype} trainer.exact_log_probs needs "
            "1.0: training rounds the divided logits"
        )
    return found
