"""The experts that every token visits."""

from __future__ import annotations

from torch import Tensor

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """All shared experts of a layer as one MLP of their summed width, tensor parallel like a dense one."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        assert config.moe_shared_expert_intermediate_size, "a shared expert needs a width"
        super().__init__(config, groups, ops, config.moe_shared_expert_intermediate_size)

    def linear_fc1_forward_and_act(self, x_TH: Tensor) -> Tensor:
        """The first half: [T/TP, H] -> [T, F/TP] (F: the shared width)."""
        return self.swiglu(self.linear_fc1(x_TH))

    def linear_fc2_forward(self, hidden_TF: Tensor) -> Tensor:
        """The second half: [T, F/TP] -> [T/TP, H]."""
        y_TH: Tensor = self.linear_fc2(hidden_TF)
        return y_TH
