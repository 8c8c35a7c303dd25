"""Which class runs which architecture."""

from __future__ import annotations

from vllm.model_executor.models.causal_lm import CausalLM
from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
