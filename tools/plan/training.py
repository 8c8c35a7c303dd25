"""The training calls of a step on one rank: what they send, and the most memory they take beside the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_formats.config import load_hf_config
from tools.plan.collectives import CollectiveLog, Phase
from tools.plan.device import MemoryMeter
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.workers.megatron_workers import ActorRolloutRefWorker

OLD, REF, UPDATE = "compute_log_prob", "compute_ref_log_prob", "update_actor"


@dataclass(frozen=True)
class Rows:
    """The rows that every data-parallel rank gets of one step: ``num`` of them, all alike."""

    num: int
    prompt_length: int
    response_length: int


@dataclass(frozen=True)
class TrainingPhase:
    """One call of a rank: its collectives in order, and bytes beside what was there before it.

    peak_bytes: most that were alive at one time · left_bytes: still alive when it ended.
    """

    collectives: Phase
    peak_bytes: int
    left_bytes: int


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


def run_training(
    worker: ActorRolloutRefWorker,
    rows: Rows,
    log: CollectiveLog,
    meter: MemoryMeter,
    before_call: Callable[[], None] = lambda: None,
) -> dict[str, TrainingPhase]:
    """Makes the training calls of one step on ``worker``, planned or real, while ``log`` and ``meter`` are active.

    before_call: waits until real process groups have let go of what the call before it sent.
    """
    batch = batch_of(rows, worker.run_config)
    done = {}
    for name in training_calls(worker.run_config):
        before_call()
        before = meter.now_bytes
        meter.peak_bytes = before
        with log.phase(name):
            getattr(worker, name)(batch)
        phase = next((phase for phase in reversed(log.phases) if phase.name == name), Phase(name, ()))
        done[name] = TrainingPhase(phase, meter.peak_bytes - before, meter.now_bytes - before)
    return done
