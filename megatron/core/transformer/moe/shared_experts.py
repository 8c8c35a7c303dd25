"""The experts that every token visits."""

from __future__ import annotations

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig


class SharedExpertMLP(MLP):
    """All shared experts of a layer as one MLP of their summed width, tensor parallel like a dense one."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        assert config.moe_shared_expert_intermediate_size, "a shared expert needs a width"
        super().__init__(config, groups, ops, config.moe_shared_expert_intermediate_size)
