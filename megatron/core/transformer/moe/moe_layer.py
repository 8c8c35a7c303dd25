"""One mixture-of-experts layer (DeepSeekMoE, arXiv 2401.06066): routed experts plus shared ones."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class MoELayer(nn.Module):
    """[T/TP, H] -> [T/TP, H]: the weighted sum of each token's routed experts, plus the shared experts."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        assert config.num_moe_experts is not None, "a MoE layer needs num_moe_experts"
        self.router = TopKRouter(config, ops)
        self.experts = GroupedMLP(config, groups, ops)
        self.token_dispatcher = MoEAlltoAllTokenDispatcher(config.num_moe_experts, groups, ops)
        self.shared_experts: SharedExpertMLP | None = None
        if config.moe_shared_expert_intermediate_size:
            self.shared_experts = SharedExpertMLP(config, groups, ops)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        rows, tokens_per_expert, plan = self.token_dispatcher.token_permutation(x_TH, *self.router(x_TH))
        y_TH = self.token_dispatcher.token_unpermutation(self.experts(rows, tokens_per_expert), plan)
        return y_TH if self.shared_experts is None else y_TH + self.shared_experts(x_TH)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill router, experts and shared experts from the tensors under ``name``."""
        self.router.init_weights(init, f"{name}.router")
        self.experts.init_weights(init, f"{name}.experts")
        if self.shared_experts is not None:
            self.shared_experts.init_weights(init, f"{name}.shared_experts")
