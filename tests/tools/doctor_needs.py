"""The memory and disk that a run needs on its nodes, by its config: what tools/doctor/tested.toml must say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_formats.config import HFModelConfig
from mindspeed_llm.hf_shapes import hf_bytes, hf_tensors
from mindspeed_llm.weight_plan import local_plan
from verl.trainer.config import PPOTrainerConfig

MASTER_AND_MOMENTS = 12  # bytes of a parameter: fp32 master weight and both Adam moments
WEIGHT = 2  # bytes of a bfloat16 parameter
FP8_OF_BF16 = 0.52  # DeepSeek's published files: one byte an element, scales of 128 x 128 blocks, some tensors BF16


@dataclass(frozen=True)
class Needs:
    """Bytes: on the fullest node's host between the phases of a step, and on the run's shared disk."""

    host_bytes: int
    input_bytes: int  # published weights, BF16 weights, shards
    checkpoint_bytes: int  # one training checkpoint


def needs_of(config: PPOTrainerConfig, hf: HFModelConfig) -> Needs:
    """The needs of a run, by planning every rank; takes seconds for 671B on 256 dies."""
    engine, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    layout = engine.layout(trainer.world_size)
    bytes_of_rank, shards = [], {}
    for rank in range(trainer.world_size):
        coords = layout.coords(rank)
        tensors = [tensor for tensor in local_plan(hf, layout, rank) if not tensor.is_buffer]
        expert = sum(tensor.num_elements for tensor in tensors if tensor.is_expert)
        dense = sum(tensor.num_elements for tensor in tensors) - expert
        copies = engine.param_offload + config.actor_rollout_ref.actor.use_kl_loss
        state = 0.0
        if on_host := _host_fraction(config):
            replicas = layout.data_parallel_size * layout.context_parallel_size
            state = on_host * MASTER_AND_MOMENTS * (dense / replicas + expert / layout.expert_data_parallel_size)
        bytes_of_rank.append(copies * WEIGHT * (dense + expert) + state)
        shards[coords.tp, coords.pp, coords.ep] = WEIGHT * (dense + expert)
    per_node = trainer.n_gpus_per_node
    host = max(sum(bytes_of_rank[first : first + per_node]) for first in range(0, trainer.world_size, per_node))
    inputs = 0.0
    if engine.load_weight:
        inputs = hf_bytes(hf) * (1 + FP8_OF_BF16) + (sum(shards.values()) if engine.use_dist_checkpointing else 0)
    num_params = sum(math.prod(shape) for shape, _ in hf_tensors(hf).values())
    return Needs(int(host), int(inputs), num_params * (WEIGHT + MASTER_AND_MOMENTS))


def _host_fraction(config: PPOTrainerConfig) -> float:
    """The fraction of the optimizer's state that is on the host between the phases."""
    actor = config.actor_rollout_ref.actor
    if actor.megatron.swap_optimizer or actor.megatron.optimizer_offload:
        return 1.0
    overrides = actor.optim.override_optimizer_config
    is_hosted = overrides.get("optimizer_cpu_offload", False)
    return float(overrides.get("optimizer_offload_fraction", 1.0)) if is_hosted else 0.0
