"""Keys that upstream's scripts set and that need no action here: each is checked against this table, then dropped."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

ANY: tuple[Any, ...] = ()
_ENGINE = "actor_rollout_ref.*.megatron"  # the actor's and the reference's
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_FLAG = (True, False)

# dotted key or shell pattern -> (accepted values, what decides instead)
FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "data.reward_fn_key": (("data_source",), "the column that every reward function is given"),
    "data.return_raw_chat": (_FLAG, "raw prompts are never sent to the workers"),
    "data.trust_remote_code": ((False,), "model directories are never executed"),
    "data.truncation": (("error",), "data.filter_overlong_prompts=True drops long prompts, and no prompt is cut"),
    "actor_rollout_ref.model.trust_remote_code": ((False,), "model directories are never executed"),
    "actor_rollout_ref.model.use_remove_padding": (_FLAG, "training always works on packed tokens"),
    "actor_rollout_ref.model.use_fused_kernels": ((False,), "trainer.train_ops decides"),
    "actor_rollout_ref.*.strategy": (("megatron",), "the only training engine"),
    "actor_rollout_ref.actor.use_torch_compile": (_FLAG, "no torch.compile is used"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ((None,), "use ppo_micro_batch_size_per_gpu"),
    f"{_ENGINE}.use_mbridge": (_FLAG, "weights are read from Hugging Face files by one plan"),
    f"{_ENGINE}.use_distributed_optimizer": ((True,), "the optimizer state is always sharded"),
    f"{_OVERRIDE}.multi_head_latent_attention": ((True,), "the model's config.json decides"),
    f"{_OVERRIDE}.moe_grouped_gemm": ((True,), "experts are always grouped"),
    f"{_OVERRIDE}.moe_permutation_async_comm": ((True,), "counts are always exchanged while tokens are sorted"),
    f"{_OVERRIDE}.use_flash_attn": ((True,), "trainer.train_ops decides"),
    f"{_OVERRIDE}.attention_backend": (("flash", "auto"), "trainer.train_ops decides"),
    f"{_OVERRIDE}.use_fused_rotary_pos_emb": ((True,), "trainer.train_ops decides"),
    f"{_OVERRIDE}.use_fused_swiglu": ((True,), "trainer.train_ops decides"),
    f"{_OVERRIDE}.use_fused_rmsnorm": ((True,), "trainer.train_ops decides"),
    f"{_OVERRIDE}.use_fused_moe_token_permute_and_unpermute": ((True,), "trainer.train_ops decides"),
    f"{_OVERRIDE}.attention_dropout": ((0.0,), "there is no dropout"),
    f"{_OVERRIDE}.hidden_dropout": ((0.0,), "there is no dropout"),
    f"{_OVERRIDE}.attention_softmax_in_fp32": ((True,), "the softmax is always computed in float32"),
    f"{_OVERRIDE}.qk_layernorm": ((True,), "the model's config.json decides"),
    f"{_OVERRIDE}.position_embedding_type": (("rope",), "the model's config.json decides"),
    f"{_OVERRIDE}.use_rope_scaling": (_FLAG, "the model's config.json decides"),
    f"{_OVERRIDE}.rope_scaling_type": (("yarn",), "the model's config.json decides"),
    f"{_OVERRIDE}.rope_scaling_*": (ANY, "the model's config.json decides"),
    f"{_OVERRIDE}.variable_seq_lengths": ((True,), "every stage knows the shapes of packed micro-batches"),
    f"{_OVERRIDE}.seq_length": (ANY, "data.max_prompt_length and data.max_response_length decide"),
    f"{_OVERRIDE}.swap_optimizer": (ANY, "actor.megatron.swap_optimizer decides"),
    "actor_rollout_ref.ref.load_weight": (_FLAG, "actor.load_weight and ref.megatron.load_weight decide"),
    "actor_rollout_ref.rollout.do_sample": (_FLAG, "training always samples"),
    "actor_rollout_ref.rollout.free_cache_engine": (_FLAG, "weights and cache are freed after every generation"),
    "actor_rollout_ref.rollout.load_format": (
        ("dummy", "auto", "dummy_megatron", "auto_megatron"),
        "weights always come from the trainer",
    ),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": ((None,), "use log_prob_micro_batch_size_per_gpu"),
    "actor_rollout_ref.rollout.disable_log_stats": (_FLAG, "the trainer's metrics carry them"),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": ((1,), "generation has no pipeline stages"),
    "algorithm.lam": ((1.0,), "no estimator uses it"),
    "algorithm.rollout_correction.use_policy_gradient": (
        (False,),
        "bypass_mode trains with actor.policy_loss.loss_mode",
    ),
    "reward_model.enable": ((False,), "rewards are functions, there is no reward network"),
    "reward_model.launch_reward_fn_async": (_FLAG, "scoring always runs while log-probs are computed"),
    "trainer.critic_warmup": ((0,), "there is no critic"),
}


def take_fixed_keys(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Remove the keys of the table from ``tree``; one sentence for each value that means nothing here."""
    found = []
    for key, value in list(tree.items()):
        name = f"{prefix}{key}"
        fixed = next((FIXED_KEYS[pattern] for pattern in FIXED_KEYS if fnmatchcase(name, pattern)), None)
        if fixed is None:
            found += take_fixed_keys(value, f"{name}.") if isinstance(value, dict) else []
            continue
        accepted, reason = fixed
        if accepted and value not in accepted:
            found.append(f"{name} is {value!r}; expected {' or '.join(map(repr, accepted))} ({reason})")
        del tree[key]
    return found
