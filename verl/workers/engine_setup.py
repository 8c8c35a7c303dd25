"""Builds the training engine's configs, which validate themselves, from the typed config."""

from __future__ import annotations

from typing import Any

import torch

from hf_formats.config import HFModelConfig
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import layout_problems
from megatron.core.optimizer import OptimizerConfig
from mindspeed_llm.model import to_transformer_config
from verl.trainer.config.config import ActorRolloutRefConfig
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

PARAMS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def trained_model(hf: HFModelConfig, engine: McoreEngineConfig) -> HFModelConfig:
    """``hf`` with the multi-token-prediction modules that the actor trains; ValueError when it has fewer."""
    return hf.with_mtp(engine.override_transformer_config.get("mtp_num_layers") or 0)


def model_fields(models: ActorRolloutRefConfig, engine: McoreEngineConfig) -> dict[str, Any]:
    """The other arguments of ``build_model``: the dtype and fields of the engine's TransformerConfig."""
    fields = engine.transformer_fields(
        models.model.gradient_checkpointing_kwargs, models.model.enable_gradient_checkpointing
    )
    fields.pop("mtp_num_layers", None)  # part of the model, see trained_model
    # The loss is normalised over the whole mini-batch: gradients are sums.
    fields |= {"calculate_per_token_loss": True, "freeze_moe_router": models.model.freeze_moe_router}
    return fields | {"params_dtype": PARAMS_DTYPES[engine.dtype]}


def ddp_config(engine: McoreEngineConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(**({"grad_reduce_in_fp32": True} | _given(engine.override_ddp_config)))


def optimizer_config(optim: McoreOptimizerConfig, engine: McoreEngineConfig) -> OptimizerConfig:
    """The config of AdamW, of the place of its state, and of gradients that are not finite."""
    overrides = _given(optim.override_optimizer_config)
    dtypes = {key: _STATE_DTYPES[value] for key, value in overrides.items() if key.endswith("_dtype")}
    return OptimizerConfig(
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.adam_eps,
        clip_grad=optim.clip_grad,
        **(overrides | dtypes),
    )


def engine_problems(models: ActorRolloutRefConfig, world_size: int, hf: HFModelConfig) -> list[str]:
    """Returns what the engine would refuse in the workers, one sentence each; creates no group and no weight."""
    found = []
    actor = models.actor
    where = "actor_rollout_ref.actor"
    try:
        layout = actor.megatron.layout(world_size)
        config = to_transformer_config(
            trained_model(hf, actor.megatron), layout=layout, **model_fields(models, actor.megatron)
        )
        found += [f"{where}.megatron: {problem}" for problem in layout_problems(config, layout)]
    except ValueError as error:
        found.append(f"{where}.megatron: {error}")
    try:
        ddp_config(actor.megatron)
        optimizer_config(actor.optim, actor.megatron)
    except ValueError as error:
        found.append(f"{where}.optim: {error}")
    return found


def _given(overrides: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in overrides.items() if value is not None}
