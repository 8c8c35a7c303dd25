"""A candidate as ``key=value`` overrides of the config that it came from, with verl's names."""

from __future__ import annotations

from tools.plan.search.rank import Candidate
from verl.trainer.config import PPOTrainerConfig

MODELS = "actor_rollout_ref"
ENGINE = f"{MODELS}.actor.megatron"
FIELDS = f"{ENGINE}.override_transformer_config"
ROLLOUT = f"{MODELS}.rollout"
_RECOMPUTED = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def overrides_of(candidate: Candidate, config: PPOTrainerConfig) -> list[str]:
    """What makes ``config`` the candidate."""
    given = {**_training(candidate, config), **_batches(candidate, config), **_rollout(candidate)}
    return [f"{key}={_text(value)}" for key, value in given.items()]


def _training(candidate: Candidate, config: PPOTrainerConfig) -> dict[str, object]:
    layout = candidate.shape.train.layout
    said = config.actor_rollout_ref.actor.megatron.override_transformer_config
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
    ends = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    for key in (*ends, "noop_layers", "pipeline_num_transformer_layers", "recompute_modules"):
        if said.get(key) is not None:
            found[f"{FIELDS}.{key}"] = None
    layers = candidate.shape.train.recomputed_layers
    most = max(layout.num_layer_list or (candidate.shape.model.num_hidden_layers,))
    values = (None, None, None) if layers == 0 else ("full", "block", most if layers < 0 else layers)
    for key, value in zip(_RECOMPUTED, values, strict=True):
        if value is not None or said.get(key) is not None:
            found[f"{FIELDS}.{key}"] = value
    return found


def _batches(candidate: Candidate, config: PPOTrainerConfig) -> dict[str, object]:
    update, log_prob = candidate.shape.train.update, candidate.shape.train.log_prob
    found: dict[str, object] = {}
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        found[f"{MODELS}.actor.ppo_max_token_len_per_gpu"] = update.token_budget
    else:
        found[f"{MODELS}.actor.ppo_micro_batch_size_per_gpu"] = update.samples
    key, value = "log_prob_micro_batch_size_per_gpu", log_prob.samples
    if config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz:
        key, value = "log_prob_max_token_len_per_gpu", log_prob.token_budget
    for part in ("ref", "rollout"):
        found[f"{MODELS}.{part}.{key}"] = value
    return found


def _rollout(candidate: Candidate) -> dict[str, object]:
    rollout, knobs = candidate.shape.rollout, candidate.knobs
    return {
        f"{ROLLOUT}.tensor_model_parallel_size": rollout.tp,
        f"{ROLLOUT}.data_parallel_size": rollout.dp,
        f"{ROLLOUT}.enable_expert_parallel": rollout.has_expert_parallel,
        f"{ROLLOUT}.expert_exchange": knobs.expert_exchange,
        f"{ROLLOUT}.max_num_batched_tokens": knobs.max_num_batched_tokens,
        f"{ROLLOUT}.enforce_eager": knobs.enforce_eager,
    }


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
