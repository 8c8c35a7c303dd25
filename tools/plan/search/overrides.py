"""A candidate as ``key=value`` overrides of the config that it came from, with verl's names."""

from __future__ import annotations

from tools.plan.search.rank import Candidate
from verl.trainer.config import PPOTrainerConfig

MODELS = "actor_rollout_ref"
ENGINE = f"{MODELS}.actor.megatron"
FIELDS = f"{ENGINE}.override_transformer_config"
ROLLOUT = f"{MODELS}.rollout"
_REMOVED = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "noop_layers",
    "pipeline_num_transformer_layers",
    "recompute_modules",
)
_RECOMPUTED = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def overrides_of(candidate: Candidate, config: PPOTrainerConfig) -> list[str]:
    """The overrides that make ``config`` the candidate."""
    train, rollout = candidate.shape.train, candidate.shape.rollout
    actor, layout = config.actor_rollout_ref.actor, train.layout
    own_fields = actor.megatron.override_transformer_config
    found: dict[str, object] = {
        f"{ENGINE}.tensor_model_parallel_size": layout.tensor_model_parallel_size,
        f"{ENGINE}.pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        f"{ENGINE}.virtual_pipeline_model_parallel_size": None,
        f"{ENGINE}.num_layer_list": layout.num_layer_list,
        f"{ENGINE}.context_parallel_size": layout.context_parallel_size,
        f"{ENGINE}.expert_model_parallel_size": layout.expert_model_parallel_size,
        f"{ENGINE}.expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        f"{ENGINE}.moe_tp_extend_ep": False,
        f"{MODELS}.model.enable_gradient_checkpointing": False,
    }
    again = train.recomputed_layers
    most = max(layout.num_layer_list or (candidate.shape.model.num_hidden_layers,))
    values = (None, None, None) if again == 0 else ("full", "block", most if again < 0 else again)
    fields = dict.fromkeys(_REMOVED) | dict(zip(_RECOMPUTED, values, strict=True))
    found |= {f"{FIELDS}.{key}": value for key, value in fields.items() if (value, own_fields.get(key)) != (None, None)}
    if actor.use_dynamic_bsz:
        found[f"{MODELS}.actor.ppo_max_token_len_per_gpu"] = train.update.token_budget
    else:
        found[f"{MODELS}.actor.ppo_micro_batch_size_per_gpu"] = train.update.samples
    if candidate.shape.has_reference or candidate.shape.has_old_log_prob:
        key, value = "log_prob_micro_batch_size_per_gpu", train.log_prob.samples
        if config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz:
            key, value = "log_prob_max_token_len_per_gpu", train.log_prob.token_budget
        found |= {f"{MODELS}.ref.{key}": value, f"{ROLLOUT}.{key}": value}
    found |= {
        f"{ROLLOUT}.tensor_model_parallel_size": rollout.tp,
        f"{ROLLOUT}.data_parallel_size": rollout.dp,
        f"{ROLLOUT}.enable_expert_parallel": rollout.has_expert_parallel,
        f"{ROLLOUT}.expert_exchange": rollout.expert_exchange,
        f"{ROLLOUT}.max_num_batched_tokens": rollout.max_num_batched_tokens,
        f"{ROLLOUT}.enforce_eager": not rollout.has_graphs,
    }
    return [*(f"{key}={value_text(value)}" for key, value in found.items()), *_drafts_of(candidate, config)]


def _drafts_of(candidate: Candidate, config: PPOTrainerConfig) -> list[str]:
    """The overrides of other drafts than the config's, with the sizes of their graphs."""
    rollout, own = candidate.shape.rollout, config.actor_rollout_ref.rollout
    counted = own.speculative_config.get("num_speculative_tokens", 0), own.draft_method
    if (rollout.num_drafts, rollout.draft_method) == counted:
        return []
    found: dict[str, object] = {f"{ROLLOUT}.speculative_config": None}
    if rollout.num_drafts:  # key by key: a shell would take braces for its own
        values = {"method": rollout.draft_method, "num_speculative_tokens": rollout.num_drafts}
        found = {f"{ROLLOUT}.speculative_config.{key}": value for key, value in values.items()}
    if rollout.graph_sizes:
        found[f"{ROLLOUT}.cudagraph_capture_sizes"] = rollout.graph_sizes
    return [f"{key}={value_text(value)}" for key, value in found.items()]


def value_text(value: object) -> str:
    """A value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
