"""Losses that the model attaches itself (expert balance, z-loss, MTP), and the load of its experts."""

from __future__ import annotations

from torch import nn

from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.aux_loss import collect_moe_aux_losses, set_aux_loss_scale
from megatron.core.transformer.moe.expert_load import collect_expert_loads
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock, collect_mtp_losses
from megatron.core.transformer.transformer_config import TransformerConfig


def set_auxiliary_scales(model: nn.Module, num_tokens: float, num_response_tokens: float) -> None:
    """Scales the attached losses, which are sums over tokens, by the tokens of the whole mini-batch.

    So packing changes nothing. Routers see prompts and responses, multi-token prediction learns the responses.
    """
    set_aux_loss_scale(model, 1.0 / num_tokens)
    for module in model.modules():
        if isinstance(module, MultiTokenPredictionBlock):
            module.aux_loss_scaler.scale = 1.0 / num_response_tokens


def model_metrics(model: nn.Module, config: TransformerConfig, groups: ProcessGroups) -> dict[str, float]:
    """Metrics of the attached losses and of the load of expert-parallel ranks; collective.

    Losses are without coefficients; those of experts are means over layers.
    """
    found = {}
    if config.num_moe_experts is not None and groups.ep.size() > 1:
        loads = collect_expert_loads(model, groups)
        if loads is not None:
            found["actor/expert_load_mean"], found["actor/expert_load_max"] = loads
    if config.num_moe_experts is not None and (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        for name, by_layer in collect_moe_aux_losses(model, groups).items():
            found[f"actor/{name}"] = sum(by_layer.values()) / len(by_layer)
    if config.mtp_num_layers is not None:
        for depth, value in enumerate(collect_mtp_losses(model, config, groups), start=1):
            found[f"actor/mtp_{depth}_loss"] = value
    return found
