"""Dense Qwen3: grouped-query attention with normed heads. Numerics as transformers' Qwen3ForCausalLM."""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import ParallelState
from vllm.model_executor.layers.attention import GroupedQueryAttention
from vllm.model_executor.layers.fused_moe import DeepseekMLP
from vllm.model_executor.models.causal_lm import CausalLM, DecoderLayer
from vllm.ops.contract import KVCache
from vllm.transformers_utils.config import Qwen3Config


class Qwen3ForCausalLM(CausalLM):
    """See `CausalLM`."""

    hf: Qwen3Config

    def make_layer(self, layer: int, parallel: ParallelState) -> DecoderLayer:
        mlp = DeepseekMLP(self.hf.hidden_size, self.hf.intermediate_size, parallel.tp, self.ops)
        return DecoderLayer(self.hf, self.ops, GroupedQueryAttention(self.hf, parallel, self.ops), mlp)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> KVCache:
        assert layout == "nd", layout  # the config refuses others
        num_heads = self.hf.kv_heads_of_rank(self.tp_size)
        return self.ops.new_gqa_cache(num_blocks, block_size, num_heads, self.hf.head_dim, dtype, device)
