"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.ops import TrainOps
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import TransformerConfig


class TopKRouter(nn.Module):
    """x [T/TP, H] -> (probs_TK float32, indices_TK int64, tokens_per_expert int64 [E] of this rank's tokens).

    The gate runs in float32. ``expert_bias`` (float32, persistent; None without ``moe_router_enable_expert_bias``)
    only steers the choice. ``local_tokens_per_expert`` (float32) adds up the counts of training passes until
    ``finalize_model_grads`` has used and zeroed it; ``is_counting`` is off while a layer is recomputed.
    """

    expert_bias: torch.Tensor | None
    local_tokens_per_expert: torch.Tensor

    def __init__(self, config: TransformerConfig, ops: TrainOps) -> None:
        super().__init__()
        assert config.num_moe_experts is not None, "a router needs num_moe_experts"
        self.config = config
        self.num_experts = config.num_moe_experts
        self.topk_router = ops.topk_router
        self.is_counting = True
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, sequence_parallel=config.sequence_parallel)
        bias = torch.zeros(self.num_experts, dtype=torch.float32) if config.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(self.num_experts, dtype=torch.float32)
        self.register_buffer("local_tokens_per_expert", counts, persistent=False)

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        logits_TE = F.linear(x_TH.float(), self.weight.float())
        if config.moe_router_force_load_balancing:
            logits_TE = _balanced_logits(logits_TE, config.moe_router_topk)
        probs_TK, indices_TK = self.topk_router(
            logits_TE,
            topk=config.moe_router_topk,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            norm_topk_prob=config.moe_router_norm_topk_prob,
            scaling_factor=config.moe_router_topk_scaling_factor,
            expert_bias=self.expert_bias,
        )
        chosen = indices_TK.flatten()
        # scatter_add_ where bincount would make the host wait for the device.
        counts_E = chosen.new_zeros(self.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
        if self.training and self.is_counting and torch.is_grad_enabled():
            self.local_tokens_per_expert += counts_E
        return probs_TK, indices_TK, counts_E

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the gate with the tensor ``name``; the bias and the counts become zero."""
        with torch.no_grad():
            self.weight.copy_(init.normal(name, *self.weight.shape))
            self.local_tokens_per_expert.zero_()
            if self.expert_bias is not None:
                self.expert_bias.zero_()


def _balanced_logits(logits_TE: torch.Tensor, topk: int) -> torch.Tensor:
    """Logits that send token t to experts t*K .. t*K + K-1 (modulo E): every expert gets the same load."""
    num_tokens, num_experts = logits_TE.shape
    first_T = torch.arange(num_tokens, device=logits_TE.device) * topk
    chosen_TK = (first_T[:, None] + torch.arange(topk, device=logits_TE.device)) % num_experts
    far_apart = torch.full_like(logits_TE, -15.0).scatter(1, chosen_TK, 15.0)
    return far_apart + 0.0 * logits_TE  # the gate still gets a gradient, as it would have
