"""Room for training's state on a device, where a script counts on weights that are sharded over all ranks (FSDP).

Here weights and gradients are whole on each data-parallel rank, and the optimizer's state alone is sharded. Where they
do not fit, layers are split (tensor parallelism, then pipeline stages); where nothing fits, the run is refused before
anything starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hf_formats.config import HFModelConfig, load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.weight_plan import local_plan, plan_problems
from verl.trainer.config import ConfigError, PPOTrainerConfig
from verl.trainer.config.load import replaced
from verl.utils.device import resolve_device
from verl.workers.engine_setup import ddp_config, engine_problems, trained_model
from vllm.platforms import resolve_platform

_SHARE = 0.8  # of a device's memory for the state; the rest is for activations, logits and buffers
_MASTER_BYTES = 12  # float32 weights and both moments


def fit_to_devices(config: PPOTrainerConfig, device_bytes: int | None = None) -> tuple[PPOTrainerConfig, str]:
    """``config`` with the fewest stages and the least tensor parallelism with which its state fits, and a line on it.

    Only where ``actor.megatron.fit_layout`` asks for it. ``device_bytes``: of a device, by default like those here.
    ConfigError: nothing fits, with what each device would need.
    """
    engine = config.actor_rollout_ref.actor.megatron
    if not engine.fit_layout:
        return config, ""
    hf = trained_model(load_hf_config(config.actor_rollout_ref.model.path), engine)
    total = _device_bytes(config) if device_bytes is None else device_bytes
    if total is None:
        return config, "this machine has no such device: whether weights and gradients fit is not checked"
    room, least = int(_SHARE * total), math.inf
    for tried in _layouts(config, hf):
        needed = state_bytes(tried, hf)
        least = min(least, needed)
        if needed <= room:
            layout = tried.training_layout
            if layout == config.training_layout:
                return config, ""
            return tried, (
                f"weights, gradients and optimizer would take {_gib(state_bytes(config, hf))} of a device's "
                f"{_gib(total)}: tensor_model_parallel_size={layout.tensor_model_parallel_size} "
                f"pipeline_model_parallel_size={layout.pipeline_model_parallel_size}, which need {_gib(needed)}"
            )
    raise ConfigError(
        [
            f"weights, gradients and optimizer take at least {_gib(int(least))} on each of {config.trainer.world_size} "
            f"devices in every layout, and one has {_gib(total)}, of which {_SHARE:.0%} are for them: give more "
            "devices, or keep the optimizer in host memory "
            "(actor.optim.override_optimizer_config.optimizer_cpu_offload=True)"
        ]
    )


def state_bytes(config: PPOTrainerConfig, hf: HFModelConfig) -> int:
    """Bytes of weights, gradients and this layout's part of the optimizer, on the rank that has most of them."""
    engine, optim = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.actor.optim
    layout = config.training_layout
    weight = 2 if engine.dtype == "bfloat16" else 4
    gradient = 4 if ddp_config(engine).grad_reduce_in_fp32 else weight
    on_host = engine.swap_optimizer or optim.override_optimizer_config.get("optimizer_cpu_offload")
    master = 0 if on_host else _MASTER_BYTES
    stage = layout.world_size // layout.pipeline_model_parallel_size
    return max(
        sum(
            int(tensor.num_elements * (weight + gradient + master / _shards(layout, tensor.is_expert)))
            for tensor in local_plan(hf, layout, rank)
        )
        for rank in range(0, layout.world_size, stage)
    )


def _shards(layout: ParallelLayout, is_expert: bool) -> int:
    """Ranks that share the optimizer's state of a weight."""
    if is_expert:
        return layout.expert_data_parallel_size
    return layout.data_parallel_size * layout.context_parallel_size


def _layouts(config: PPOTrainerConfig, hf: HFModelConfig) -> Iterator[PPOTrainerConfig]:
    """``config`` with each TP and PP from its own on, TP within a host first, that the model and devices divide by."""
    engine = config.actor_rollout_ref.actor.megatron
    per_host, world = config.trainer.n_gpus_per_node, config.trainer.world_size
    widths = [tp for tp in range(engine.tensor_model_parallel_size, per_host + 1) if per_host % tp == 0]
    stages = [pp for pp in range(engine.pipeline_model_parallel_size, world + 1) if world % pp == 0]
    for pp in stages:
        for tp in widths:
            if world % (tp * pp * engine.context_parallel_size):
                continue
            tried = config
            for role in ("actor", "ref"):  # the reference lives in the actor's processes
                role_engine = f"actor_rollout_ref.{role}.megatron"
                tried = replaced(tried, f"{role_engine}.tensor_model_parallel_size", tp)
                tried = replaced(tried, f"{role_engine}.pipeline_model_parallel_size", pp)
            problems = engine_problems(tried.actor_rollout_ref, world, hf)
            if not problems and not plan_problems(hf, tried.training_layout):
                yield tried


def _device_bytes(config: PPOTrainerConfig) -> int | None:
    """Memory of a device like this machine's, a rank's part of it on a CPU; None where this machine has no such one."""
    try:
        platform = resolve_platform(resolve_device(config.trainer.device))
        total = platform.memory(platform.device(0)).total_bytes
    except (ValueError, RuntimeError, AssertionError):
        return None
    return total // config.trainer.n_gpus_per_node if platform.device(0) == torch.device("cpu") else total


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
