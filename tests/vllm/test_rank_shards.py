"""What the pure function says that a rank owns is what the built model of that rank owns."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_v2_lite_config
from tests.tiny_models import CONFIGS, PLAIN
from tests.vllm.fp8_tiny import WIDE
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.model_executor.model_loader.fp8_weight_view import hold_in_fp8
from vllm.model_executor.model_loader.rank_shards import rank_shards
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import resolve
from vllm.transformers_utils.config import HFConfig, load_config

MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in (*PLAIN, "moonlight", "qwen3 tied")},
    "deepseek-v3": tiny_hf_config(num_nextn_predict_layers=1),
    "deepseek-v2-lite": tiny_v2_lite_config(first_k_dense_replace=0),
    "several blocks": WIDE,
}
# (TP, DP, world, experts over the ranks of an instance)
LAYOUTS = [(1, 1, 1, True), (2, 2, 4, True), (2, 4, 8, True), (2, 2, 8, False), (4, 1, 4, False), (1, 4, 4, True)]


def views_of(hf: HFConfig, config: ParallelConfig, quantization: str | None) -> dict[str, WeightView]:
    """The weight views of a rank's model, built without groups."""
    tp, dp = config.tensor_parallel_size, config.data_parallel_size
    ep = config.expert_parallel_size
    coordinators = [
        GroupCoordinator(config.rank % tp, tp, None),
        GroupCoordinator(config.dp_rank, dp, None),
        GroupCoordinator(config.rank % ep, ep, None),
        GroupCoordinator(0, 1, None),
    ]
    with torch.device("meta"):
        ops = resolve("vllm.ops.cpu:default_ops")
        model = CausalLM(hf, 64, ParallelState(config, *coordinators), ops, torch.device("meta"))
    return hold_in_fp8(model.weight_views) if quantization else model.weight_views


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_every_rank_of_every_layout(name: str, quantization: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIGS[name]))
    hf = load_config(str(tmp_path))
    hf = hf.with_mtp(hf.num_nextn_predict_layers)
    for tp, dp, world_size, is_expert_parallel in LAYOUTS:
        ways = product(range(world_size), {False, is_expert_parallel and tp > 1})
        for rank, shares_tokens in ways:
            config = ParallelConfig(
                tp, dp, is_expert_parallel, rank, world_size, use_sequence_parallel_moe=shares_tokens
            )
            views = views_of(hf, config, quantization)
            owned = dict(item for name, view in views.items() for item in view.shards(name))
            assert rank_shards(hf, config, torch.float32, quantization) == owned
            for name, shard in owned.items():
                assert shard.memory.shape == shard.shape, name
                assert shard.memory.dtype == shard.dtype, name
