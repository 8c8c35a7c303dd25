"""DeepSeek-V3 (R1, V3.1), Moonlight, V2 and V2-Lite."""

from __future__ import annotations

from typing import Any

from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_moonlight_config, tiny_v2_lite_config

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek-v3": tiny_hf_config(),
    "moonlight": tiny_moonlight_config(),
    "deepseek-v2-lite": tiny_v2_lite_config(),
    "deepseek-v2": tiny_v2_lite_config(
        q_lora_rank=32, n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0
    ),
}
AS_TRANSFORMERS: dict[str, Any] = {}
