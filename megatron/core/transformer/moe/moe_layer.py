"""One mixture-of-experts layer (DeepSeekMoE, arXiv 2401.06066): routed experts plus shared ones."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import make_token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class MoELayer(nn.Module):
    """[T/TP, H] -> [T/TP, H]: the weighted sum of each token's routed experts, plus the shared experts.

    With ``moe_shared_expert_overlap`` the first half of the shared experts runs while the tokens travel to the routed
    ones, the second half while the results come back, and their backward in the same way; no value changes.
    ``packed_seq_params`` tells the router of sequences, padding and routing to be replayed; None: one sequence, no
    padding.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, global_layer: int = 0) -> None:
        super().__init__()
        assert config.num_moe_experts is not None, "a MoE layer needs num_moe_experts"
        self.router = TopKRouter(config, groups, ops, global_layer)
        self.experts = GroupedMLP(config, groups, ops)
        self.token_dispatcher = make_token_dispatcher(
            config.moe_token_dispatcher_type, config.num_moe_experts, config.hidden_size, groups, ops
        )
        self.overlaps_shared_experts = config.moe_shared_expert_overlap
        has_shared = bool(config.moe_shared_expert_intermediate_size)
        self.shared_experts = SharedExpertMLP(config, groups, ops) if has_shared else None

    def forward(self, x_TH: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        beside = self.shared_experts if self.overlaps_shared_experts else None
        dispatch = self.token_dispatcher.start_dispatch(x_TH, *self.router(x_TH, packed_seq_params))
        if beside is not None:
            hidden_TF = beside.linear_fc1_forward_and_act(x_TH)
        dispatch.start_combine(self.experts(*dispatch.finish()))
        if beside is not None:
            shared_TH = beside.linear_fc2_forward(hidden_TF)
        y_TH = dispatch.finish_combine()
        if self.shared_experts is None:
            return y_TH
        return y_TH + (shared_TH if beside is not None else self.shared_experts(x_TH))
