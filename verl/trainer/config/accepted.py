"""Upstream keys that the two Ascend scripts set and that have exactly one right answer here."""

from __future__ import annotations

from typing import Any

# dotted key -> (accepted values, why nothing else is possible). Accepted keys are checked and then dropped.
FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "data.reward_fn_key": (("data_source",), "the column that every reward function is given"),
    "data.return_raw_chat": ((True, False), "raw prompts are never sent to the workers"),
    "data.trust_remote_code": ((False,), "model directories are never executed"),
    "actor_rollout_ref.model.use_remove_padding": ((True, False), "training always works on packed tokens"),
    "actor_rollout_ref.model.use_fused_kernels": ((False,), "trainer.train_ops decides"),
    "actor_rollout_ref.actor.use_torch_compile": ((False, True), "no torch.compile is used"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ((None,), "use ppo_micro_batch_size_per_gpu"),
    "actor_rollout_ref.actor.megatron.use_mbridge": ((False, True), "weights are read from HF files by one plan"),
    "actor_rollout_ref.ref.strategy": (("megatron",), "the only training engine"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": ((None,), "use log_prob_micro_batch_size_per_gpu"),
    "actor_rollout_ref.rollout.disable_log_stats": ((True, False), "the trainer's metrics carry them"),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": ((1,), "generation has no pipeline stages"),
    "algorithm.rollout_correction.use_policy_gradient": (
        (False,),
        "bypass_mode trains with actor.policy_loss.loss_mode",
    ),
    "reward_model.enable": ((False,), "rewards are functions, there is no reward network"),
    "reward_model.launch_reward_fn_async": ((True, False), "scoring always runs while log-probs are computed"),
    "trainer.critic_warmup": ((0,), "there is no critic"),
}


def fixed_key_problems(flat: dict[str, Any]) -> list[str]:
    """One sentence for every accepted upstream key whose value has no meaning here."""
    return [
        f"{key} is {flat[key]!r}; expected {' or '.join(map(repr, accepted))} ({reason})"
        for key, (accepted, reason) in FIXED_KEYS.items()
        if key in flat and flat[key] not in accepted
    ]
