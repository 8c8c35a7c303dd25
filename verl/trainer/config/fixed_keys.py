"""Keys of upstream's scripts that have no effect here: each is checked against this table, dropped, and reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

GIVEN_EMPTY = "given empty, so it keeps its default"
_ANY: tuple[Any, ...] = ()
_FLAG = (True, False)
_MODEL, _ROLES, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("model", "*", "rollout"))
_ENGINE = f"{_ROLES}.megatron"  # the actor's and the reference's
_OVERRIDE = f"{_ENGINE}.override_transformer_config"
_STATE = "actor_rollout_ref.actor.optim.override_optimizer_config"
_OPS = "trainer.train_ops decides which kernels run"
_NO_CODE = "model directories are never executed"
_NO_CRITIC = "no estimator here uses a critic network"
_NO_REWARD_NETWORK = "rewards are functions: there is no reward network"
_NO_DROPOUT = "there is no dropout"
_NO_TOOL = "the tools are torch and npu"
_SHARED_PROFILER = "the reference runs in the actor's processes: actor.profiler decides"
_ONE_LOSS = "bypass_mode trains with actor.policy_loss.loss_mode"
_LOAD_FORMATS = ("dummy", "auto", "safetensors", "dummy_megatron", "auto_megatron")
_TOKENISED = "prompts are tokenised together, once"

# section, its keys or shell patterns, accepted values, what happens instead; the first pattern that matches counts
_TABLE: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("data", "reward_fn_key", ("data_source",), "the column that every reward function is given"),
    ("data", "return_full_prompt", _FLAG, "rows always carry their whole prompt as text"),
    ("data", "return_raw_input_ids", _FLAG, "rows always carry their prompt's token ids"),
    ("data", "trust_remote_code", _FLAG, _NO_CODE),
    ("data", "filter_overlong_prompts_workers dataloader_num_workers", _ANY, _TOKENISED),
    ("data", "image_key video_key", _ANY, "prompts are texts"),
    (_MODEL, "trust_remote_code", _FLAG, _NO_CODE),
    (_MODEL, "use_remove_padding", _FLAG, "training always works on packed tokens"),
    (_MODEL, "use_fused_kernels", _FLAG, _OPS),
    (_MODEL, "use_shm", _FLAG, "weights are read from where they are"),
    (f"{_MODEL}.override_config", "attention_dropout embd_pdrop resid_pdrop", (0.0,), _NO_DROPOUT),
    (_ROLES, "strategy", ("megatron",), "the only training engine"),
    (_ROLES, "use_torch_compile", _FLAG, "training uses no torch.compile"),
    ("actor_rollout_ref.actor", "ppo_micro_batch_size", (None,), "use ppo_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.actor", "use_fused_kernels", _FLAG, _OPS),
    ("actor_rollout_ref.ref", "profiler.*", _ANY, _SHARED_PROFILER),
    (f"{_ROLES}.profiler.tool_config", "nsys.* torch_memory.*", _ANY, _NO_TOOL),
    (f"{_ROLES}.profiler.tool_config", "torch.*", (0, -1, None), "whole steps are recorded"),
    (f"{_ROLES}.profiler.tool_config", "npu.discrete", (False,), "a recording is one trace of all phases"),
    ("global_profiler", "global_tool_config.*", _ANY, _NO_TOOL),
    (_ENGINE, "use_mbridge", _FLAG, "weights are read from Hugging Face files by one plan"),
    (_ENGINE, "use_distributed_optimizer", (True,), "the optimizer state is always sharded"),
    (_OVERRIDE, "moe_grouped_gemm", (True,), "experts are always grouped"),
    (_OVERRIDE, "moe_permutation_async_comm", (True,), "counts are always exchanged while tokens are sorted"),
    (_OVERRIDE, "moe_enable_deepep", _FLAG, "moe_token_dispatcher_type=flex is DeepEP, and nothing else is"),
    (_OVERRIDE, "use_flash_attn", (True,), _OPS),
    (_OVERRIDE, "attention_backend", ("flash", "fused", "auto"), _OPS),
    (_OVERRIDE, "moe_permute_fusion use_fused_moe_token_permute_and_unpermute", _FLAG, _OPS),
    (_OVERRIDE, "use_fused_rotary_pos_emb apply_rope_fusion use_fused_swiglu use_fused_rmsnorm", _FLAG, _OPS),
    (_OVERRIDE, "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm", _FLAG, _OPS),
    (_OVERRIDE, "gradient_accumulation_fusion", _FLAG, _OPS),
    (_OVERRIDE, "deallocate_pipeline_outputs", _FLAG, "a stage frees each output as soon as it is sent"),
    (_OVERRIDE, "attention_dropout hidden_dropout", (0.0,), _NO_DROPOUT),
    (_OVERRIDE, "attention_softmax_in_fp32", (True,), "the softmax is always computed in float32"),
    (_OVERRIDE, "variable_seq_lengths", (True,), "every stage knows the shapes of packed micro-batches"),
    (_OVERRIDE, "seq_length", _ANY, "every micro-batch brings its own length"),
    (_STATE, "main_params_dtype", ("fp32",), "master weights are float32"),
    (_ROLLOUT, "do_sample", (True,), "training always samples"),
    (_ROLLOUT, "free_cache_engine", (True,), "weights and cache are freed before training"),
    (_ROLLOUT, "load_format", _LOAD_FORMATS, "weights always come from the trainer"),
    (_ROLLOUT, "log_prob_micro_batch_size", (None,), "use log_prob_micro_batch_size_per_gpu"),
    (_ROLLOUT, "disable_log_stats", _FLAG, "the trainer's metrics carry them"),
    (_ROLLOUT, "pipeline_model_parallel_size", (1,), "generation has no pipeline stages"),
    ("algorithm", "lam", (1.0,), "no estimator uses it"),
    ("algorithm.rollout_correction", "use_policy_gradient", (False,), _ONE_LOSS),
    ("critic", "enable", (False, None), _NO_CRITIC),
    ("critic", "*", _ANY, _NO_CRITIC),
    ("reward_model", "enable", (False,), _NO_REWARD_NETWORK),
    ("reward_model", "strategy megatron.* model.* profiler.* micro_batch_size*", _ANY, _NO_REWARD_NETWORK),
    ("reward_model", "launch_reward_fn_async", _FLAG, "scoring always runs while log-probs are computed"),
    ("trainer", "critic_warmup", (0,), _NO_CRITIC),
)
# dotted key or pattern -> (accepted values, what happens instead)
FIXED_KEYS = {f"{section}.{key}": (values, why) for section, keys, values, why in _TABLE for key in keys.split()}
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


@dataclass
class Given:
    """What was given, on its way to the typed tree."""

    values: dict[str, Any]  #: by dotted key; what is taken out is reported in one of the other two.
    taken: list[WithoutEffect] = field(default_factory=list)  #: what has no effect.
    problems: list[str] = field(default_factory=list)  #: a sentence for each value that asks for what does not happen.

    def take(self, key: str, reason: str) -> None:
        """Take out a key that has no effect."""
        self.taken.append(WithoutEffect(key, self.values.pop(key), reason))


def take_fixed_keys(given: Given) -> None:
    """Take out the keys of the table."""
    for name, value in list(given.values.items()):
        fixed = next((FIXED_KEYS[pattern] for pattern in FIXED_KEYS if fnmatchcase(name, pattern)), None)
        if fixed is None:
            continue
        accepted, reason = fixed
        if accepted and value not in (*accepted, ""):
            given.problems.append(f"{name} is {value!r}; expected {' or '.join(map(repr, accepted))} ({reason})")
        given.take(name, GIVEN_EMPTY if value == "" else reason)


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
