"""Keys of upstream's scripts that have no effect here: each is checked against this table, dropped, and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

GIVEN_EMPTY = "given empty, so it keeps its default"
ANY: tuple[Any, ...] = ()
_ENGINE = "actor_rollout_ref.*.megatron"  # the actor's and the reference's
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_MODEL = "actor_rollout_ref.model.override_config"
_FLAG = (True, False)
_OPS = "trainer.train_ops decides which kernels run"
_NO_CODE = "model directories are never executed"
_NO_CRITIC = "no estimator here uses a critic network"
_NO_REWARD_NETWORK = "rewards are functions: there is no reward network"
_NO_DROPOUT = "there is no dropout"
_NO_TOOL = "the tools are torch and npu"

# dotted key or shell pattern -> (accepted values, what happens instead); the first pattern that matches counts
FIXED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "data.reward_fn_key": (("data_source",), "the column that every reward function is given"),
    "data.return_full_prompt": (_FLAG, "rows always carry their whole prompt as text"),
    "data.return_raw_input_ids": (_FLAG, "rows always carry their prompt's token ids"),
    "data.trust_remote_code": (_FLAG, _NO_CODE),
    "data.filter_overlong_prompts_workers": (ANY, "prompts are tokenised together, once"),
    "data.dataloader_num_workers": (ANY, "prompts are tokenised together, once"),
    "data.image_key": (ANY, "prompts are texts"),
    "data.video_key": (ANY, "prompts are texts"),
    "actor_rollout_ref.model.trust_remote_code": (_FLAG, _NO_CODE),
    "actor_rollout_ref.model.use_remove_padding": (_FLAG, "training always works on packed tokens"),
    "actor_rollout_ref.model.use_fused_kernels": (_FLAG, _OPS),
    "actor_rollout_ref.model.use_shm": (_FLAG, "weights are read from where they are"),
    f"{_MODEL}.attention_dropout": ((0.0,), _NO_DROPOUT),
    f"{_MODEL}.embd_pdrop": ((0.0,), _NO_DROPOUT),
    f"{_MODEL}.resid_pdrop": ((0.0,), _NO_DROPOUT),
    "actor_rollout_ref.*.strategy": (("megatron",), "the only training engine"),
    "actor_rollout_ref.*.use_torch_compile": (_FLAG, "training uses no torch.compile"),
    "actor_rollout_ref.actor.ppo_micro_batch_size": ((None,), "use ppo_micro_batch_size_per_gpu"),
    "actor_rollout_ref.actor.use_fused_kernels": (_FLAG, _OPS),
    "actor_rollout_ref.ref.profiler.*": (ANY, "the reference runs in the actor's processes: actor.profiler decides"),
    "actor_rollout_ref.*.profiler.tool_config.nsys.*": (ANY, _NO_TOOL),
    "actor_rollout_ref.*.profiler.tool_config.torch_memory.*": (ANY, _NO_TOOL),
    "actor_rollout_ref.*.profiler.tool_config.torch.*": ((0, -1, None), "whole steps are recorded"),
    "actor_rollout_ref.*.profiler.tool_config.npu.discrete": ((False,), "a recording is one trace of all phases"),
    "global_profiler.global_tool_config.*": (ANY, _NO_TOOL),
    f"{_ENGINE}.use_mbridge": (_FLAG, "weights are read from Hugging Face files by one plan"),
    f"{_ENGINE}.use_distributed_optimizer": ((True,), "the optimizer state is always sharded"),
    f"{_OVERRIDE}.moe_grouped_gemm": ((True,), "experts are always grouped"),
    f"{_OVERRIDE}.moe_permutation_async_comm": ((True,), "counts are always exchanged while tokens are sorted"),
    f"{_OVERRIDE}.moe_enable_deepep": (_FLAG, "moe_token_dispatcher_type=flex is DeepEP, and nothing else is"),
    f"{_OVERRIDE}.moe_permute_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.use_flash_attn": ((True,), _OPS),
    f"{_OVERRIDE}.attention_backend": (("flash", "fused", "auto"), _OPS),
    f"{_OVERRIDE}.use_fused_rotary_pos_emb": (_FLAG, _OPS),
    f"{_OVERRIDE}.apply_rope_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.use_fused_swiglu": (_FLAG, _OPS),
    f"{_OVERRIDE}.use_fused_rmsnorm": (_FLAG, _OPS),
    f"{_OVERRIDE}.use_fused_moe_token_permute_and_unpermute": (_FLAG, _OPS),
    f"{_OVERRIDE}.bias_activation_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.bias_dropout_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.masked_softmax_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.persist_layer_norm": (_FLAG, _OPS),
    f"{_OVERRIDE}.gradient_accumulation_fusion": (_FLAG, _OPS),
    f"{_OVERRIDE}.deallocate_pipeline_outputs": (_FLAG, "a stage frees each output as soon as it is sent"),
    f"{_OVERRIDE}.attention_dropout": ((0.0,), _NO_DROPOUT),
    f"{_OVERRIDE}.hidden_dropout": ((0.0,), _NO_DROPOUT),
    f"{_OVERRIDE}.attention_softmax_in_fp32": ((True,), "the softmax is always computed in float32"),
    f"{_OVERRIDE}.variable_seq_lengths": ((True,), "every stage knows the shapes of packed micro-batches"),
    f"{_OVERRIDE}.seq_length": (ANY, "every micro-batch brings its own length"),
    "actor_rollout_ref.rollout.do_sample": ((True,), "training always samples"),
    "actor_rollout_ref.rollout.free_cache_engine": (
        (True,),
        "weights and cache are freed before training",
    ),
    "actor_rollout_ref.rollout.load_format": (
        ("dummy", "auto", "safetensors", "dummy_megatron", "auto_megatron"),
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
    "critic.enable": ((False, None), _NO_CRITIC),
    "critic.*": (ANY, _NO_CRITIC),
    "reward_model.enable": ((False,), _NO_REWARD_NETWORK),
    "reward_model.strategy": (ANY, _NO_REWARD_NETWORK),
    "reward_model.megatron.*": (ANY, _NO_REWARD_NETWORK),
    "reward_model.model.*": (ANY, _NO_REWARD_NETWORK),
    "reward_model.profiler.*": (ANY, _NO_REWARD_NETWORK),
    "reward_model.micro_batch_size*": (ANY, _NO_REWARD_NETWORK),
    "reward_model.launch_reward_fn_async": (_FLAG, "scoring always runs while log-probs are computed"),
    "trainer.critic_warmup": ((0,), _NO_CRITIC),
}
# Environment variables of the published recipes' scripts, as shell patterns -> what happens instead.
FIXED_VARIABLES: dict[str, str] = {
    "VLLM_DP_SIZE": "actor_rollout_ref.rollout.data_parallel_size decides; absent means all replicas",
    "VLLM_ENABLE_GRAPH_MODE": "actor_rollout_ref.rollout.enforce_eager decides",
    "VLLM_ENABLE_FIX_ROUTE": "actor_rollout_ref.rollout.fix_router decides",
    "VLLM_ENABLE_MC2": "actor_rollout_ref.rollout.expert_exchange decides",
    "VLLM_ATTENTION_BACKEND": "trainer.rollout_ops decides which kernels run",
    "VLLM_USE_V1": "there is one engine",
    "VLLM_VERSION": "there is one engine",
    "VLLM_ASCEND_*": "there is one engine",
    "D2D_DATA_TRANSFER": "rows always go from worker to worker",
    "NO_ALL_TO_ALL_RESHARD": "weights always go from the ranks that train them to those that generate with them",
    "ROLLOUT_REBALANCE_ENABLE": "actor_rollout_ref.rollout.rebalance_interval decides",
    "PRINT_MEMORY": "memory is among the metrics of every step",
    "PROFILE_UPDATE": "global_profiler.steps and actor_rollout_ref.actor.profiler decide",
}


@dataclass(frozen=True)
class WithoutEffect:
    """A key that was given and changes nothing, with the reason."""

    key: str
    value: Any
    reason: str


def take_fixed_keys(tree: dict[str, Any], prefix: str = "") -> tuple[list[WithoutEffect], list[str]]:
    """Remove the keys of the table from ``tree``.

    Returns those that have no effect, and a sentence for each value that asks for something else than what happens.
    """
    taken: list[WithoutEffect] = []
    problems: list[str] = []
    for key, value in list(tree.items()):
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            inner_taken, inner_problems = take_fixed_keys(value, f"{name}.")
            taken, problems = taken + inner_taken, problems + inner_problems
            if not value and inner_taken:
                del tree[key]
            continue
        fixed = next((FIXED_KEYS[pattern] for pattern in FIXED_KEYS if fnmatchcase(name, pattern)), None)
        if fixed is None:
            continue
        accepted, reason = fixed
        if value == "":
            taken.append(WithoutEffect(name, value, GIVEN_EMPTY))
        elif accepted and value not in accepted:
            problems.append(f"{name} is {value!r}; expected {' or '.join(map(repr, accepted))} ({reason})")
        else:
            taken.append(WithoutEffect(name, value, reason))
        del tree[key]
    return taken, problems


def variables_without_effect(environment: Mapping[str, str]) -> list[WithoutEffect]:
    """The variables of the published recipes that are set in ``environment`` and change nothing here."""
    return [
        WithoutEffect(name, value, reason)
        for pattern, reason in FIXED_VARIABLES.items()
        for name, value in sorted(environment.items())
        if fnmatchcase(name, pattern)
    ]


def without_effect_block(taken: Iterable[WithoutEffect]) -> str:
    """The keys by reason, for the log at start and for a plan; empty where there are none."""
    by_reason: dict[str, list[str]] = {}
    for item in taken:
        by_reason.setdefault(item.reason, []).append(f"{item.key}={item.value}")
    lines = [f"  {', '.join(sorted(keys))}: {reason}" for reason, keys in by_reason.items()]
    return "\n".join(["taken without effect:", *lines]) if lines else ""
