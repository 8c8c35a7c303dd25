"""The training calls of a step, and the batch that they get."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_formats.config import load_hf_config
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig

OLD, REF, UPDATE = "compute_log_prob", "compute_ref_log_prob", "update_actor"


@dataclass(frozen=True)
class Rows:
    """The rows that every data-parallel rank gets of one step: ``num`` of them, all alike."""

    num: int
    prompt_length: int
    response_length: int


def batch_of(rows: Rows, config: PPOTrainerConfig) -> DataProto:
    """A batch as a training call gets it, every column on the host; tokens are 0 and so are log-probs."""
    data = config.data
    prompts = torch.arange(data.max_prompt_length) >= data.max_prompt_length - rows.prompt_length
    responses = torch.arange(data.max_response_length) < rows.response_length
    attention_BL = torch.cat([prompts, responses]).long().expand(rows.num, -1)
    response_BR = responses.long().expand(rows.num, -1)
    zeros_BR = torch.zeros(response_BR.shape)
    tensors = {
        "input_ids": torch.zeros_like(attention_BL),
        "attention_mask": attention_BL.contiguous(),
        "response_mask": response_BR.contiguous(),
        "advantages": zeros_BR,
    }
    if config.needs_old_log_prob:
        tensors["old_log_probs"] = zeros_BR
    if config.use_reference_policy:
        tensors["ref_log_prob"] = zeros_BR
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        tensors["rollout_log_probs"] = zeros_BR
    if config.actor_rollout_ref.actor.takes_rollout_routing:
        hf = load_hf_config(config.actor_rollout_ref.model.path)
        layers = range(hf.first_k_dense_replace, hf.num_hidden_layers)
        num_moe = sum(layer % hf.moe_layer_freq == 0 for layer in layers)
        choices = torch.zeros(1, dtype=torch.uint8).expand(*attention_BL.shape, num_moe, hf.num_experts_per_tok)
        tensors["routed_experts"] = choices
    temperature = config.actor_rollout_ref.rollout.temperature
    meta = {"temperature": temperature, "rollout_n": config.actor_rollout_ref.rollout.n, "global_step": 1}
    return DataProto.from_dict(tensors, meta_info=meta)


def training_calls(config: PPOTrainerConfig) -> list[str]:
    """The worker's methods that a step calls after generation, in order."""
    calls = [OLD] if config.needs_old_log_prob else []
    return [*calls, *([REF] if config.use_reference_policy else []), UPDATE]
