"""DeepSeek-V2 and DeepSeek-V3: latent attention, first layers dense, then mixtures of experts.

Numerics as transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM.
"""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import ParallelState
from vllm.model_executor.layers.fused_moe import DeepseekMLP, FusedMoE
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.models.causal_lm import CausalLM, DecoderLayer
from vllm.ops.contract import KVCache
from vllm.transformers_utils.config import DeepseekV3Config


class DeepseekV2ForCausalLM(CausalLM):
    """See `CausalLM`."""

    hf: DeepseekV3Config

    @property
    def prunes_last_layer(self) -> bool:
        return self.ops.prefill_equals_decode

    def make_layer(self, layer: int, parallel: ParallelState) -> DecoderLayer:
        hf, ops = self.hf, self.ops
        mlp: DeepseekMLP | FusedMoE
        if layer < hf.first_k_dense_replace:
            mlp = DeepseekMLP(hf.hidden_size, hf.intermediate_size, parallel.tp, ops)
        else:
            mlp = FusedMoE(hf, parallel, ops)
        return DecoderLayer(hf, ops, MultiHeadLatentAttention(hf, parallel, ops), mlp)

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> KVCache:
        sizes = (num_blocks, block_size, self.hf.kv_lora_rank, self.hf.qk_rope_head_dim)
        return self.ops.new_kv_cache(*sizes, dtype, device, layout)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 and Moonlight: its routing is in the config."""
