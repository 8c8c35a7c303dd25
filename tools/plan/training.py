"""The training calls of a step, and the batch that they get."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_formats.config import load_hf_config
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig

OLD, REF, UPDATE = "compute_log_prob", "compute_ref_log_prob", "update_actor"


@dataclass(frozen=True)
class StepSize:
    """Tokens of every row of a step.

    load: see ``tools.plan.ops.Routing`` · acceptance: shares of right drafts by position, for the number of decode
    steps; empty counts them as if none were right.
    """

    prompt_length: int
    response_length: int
    load: float = 1.0
    acceptance: tuple[float, ...] = ()


def batch_of(num_rows: int, size: StepSize, config: PPOTrainerConfig, samples_together: int = 1) -> DataProto:
    """A batch as a training call gets it, every column on the host, of prompts with ``samples_together`` rows each.

    All tokens are 0, but for one that tells prompts apart, and so are log-probs.
    """
    data, models = config.data, config.actor_rollout_ref
    prompts = torch.arange(data.max_prompt_length) >= data.max_prompt_length - size.prompt_length
    responses = torch.arange(data.max_response_length) < size.response_length
    attention_BL = torch.cat([prompts, responses]).long().expand(num_rows, -1)
    response_BR = responses.long().expand(num_rows, -1)
    zeros_BR, input_ids_BL = torch.zeros(response_BR.shape), torch.zeros_like(attention_BL)
    input_ids_BL[:, data.max_prompt_length - 1] = torch.arange(num_rows) // samples_together
    tensors = {
        "input_ids": input_ids_BL,
        "attention_mask": attention_BL.contiguous(),
        "response_mask": response_BR.contiguous(),
        "advantages": zeros_BR,
    }
    if config.needs_old_log_prob:
        tensors["old_log_probs"] = zeros_BR
    if config.use_reference_policy:
        tensors["ref_log_prob"] = zeros_BR
    if models.rollout.calculate_log_probs:
        tensors["rollout_log_probs"] = zeros_BR
    if models.actor.takes_rollout_routing:
        hf = load_hf_config(models.model.path)
        choice = torch.zeros(1, dtype=torch.uint8)
        tensors["routed_experts"] = choice.expand(*attention_BL.shape, hf.num_moe_layers, hf.num_experts_per_tok)
    meta = {"temperature": models.rollout.temperature, "rollout_n": models.rollout.n, "global_step": 1}
    return DataProto.from_dict(tensors, meta_info=meta)


def training_calls(config: PPOTrainerConfig) -> list[str]:
    """The worker's methods that a step calls after generation, in order."""
    calls = [OLD] if config.needs_old_log_prob else []
    return [*calls, *([REF] if config.use_reference_policy else []), UPDATE]
