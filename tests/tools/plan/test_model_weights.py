"""The weights that the planner computes from config.json's figures are those of the models that a run builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_formats.config import HFModelConfig, parse_hf_config
from megatron.core.ops import reference_ops
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.model import build_model
from tests.tiny_models import CONFIGS
from tools.plan.model_work import model_work
from tools.plan.search.weights import rollout_rank, training_stage
from tools.plan.timing.published import published_model
from tools.plan.world import own_groups, planned_rank
from vllm.config import ParallelConfig
from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import resolve

TRAINING: dict[str, dict[str, Any]] = {
    "tp4": {
        "world_size": 4,
        "tensor_model_parallel_size": 4,
    },  # the grouped-query models have 2 heads of keys and values
    "tp2 pp2 uneven": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_layer_list": (1, 2),
    },
    "pp3 cp2": {"world_size": 6, "pipeline_model_parallel_size": 3, "context_parallel_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "tp2 ep2 etp2": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
    "pp2 ep4": {
        "world_size": 8,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "num_layer_list": (2, 1),
    },
}
ROLLOUT = [(1, 1, False), (2, 1, False), (4, 1, False), (2, 2, True)]  # TP, DP, experts over all ranks


@pytest.mark.parametrize("name", CONFIGS)
def test_training_stages(name: str) -> None:
    hf = parse_hf_config(CONFIGS[name])
    for fields in (TRAINING | (EXPERTS if hf.n_routed_experts else {})).values():
        layout = ParallelLayout(**fields)
        for stage in range(layout.pipeline_model_parallel_size):
            rank = layout.world_size // layout.pipeline_model_parallel_size * (stage + 1) - 1
            with planned_rank(rank, layout.world_size, layout.world_size), torch.device("meta"):
                groups = own_groups(layout, rank)
                model = build_model(hf, groups, reference_ops(), params_dtype=torch.bfloat16)
            assert groups.coords.pp == stage
            assert _sizes(model) == training_stage(hf, layout, stage), fields


@pytest.mark.parametrize("name", CONFIGS)
def test_rollout_ranks(name: str) -> None:
    hf = parse_hf_config(CONFIGS[name])
    for tp, dp, has_ep in ROLLOUT if hf.n_routed_experts else ROLLOUT[:3]:
        for shares in {False, has_ep}:
            config = ParallelConfig(tp, dp, has_ep, tp * dp - 1, tp * dp, use_sequence_parallel_moe=shares)
            ranks = [GroupCoordinator(size - 1, size, None) for size in (tp, dp, config.expert_parallel_size, 1)]
            with torch.device("meta"):
                ops, device = resolve("vllm.ops.cpu:default_ops"), torch.device("meta")
                model = CausalLM(hf, 64, ParallelState(config, *ranks), ops, device)
            gates = sum(x.numel() for key, x in model.named_parameters() if key.endswith(".mlp.gate"))
            expert_ranks = tp * dp if has_ep else tp
            found = rollout_rank(hf, tp, expert_ranks, shares)
            assert found == (sum(_sizes(model)) - gates, gates), (tp, dp, has_ep, shares)


def test_published_models() -> None:
    """The sizes that their publishers give."""
    sizes = {"deepseek_v3": 671_026_404_352, "qwen3_30b_a3b": 30_532_122_624, "qwen3_235b_a22b": 235_093_634_560}
    for name, size in sizes.items():
        hf = published_model(name)
        assert sum(training_stage(hf, ParallelLayout(), 0)) == sum(rollout_rank(hf, 1, 1)) == size, name
        assert size - model_work(hf).parameters == _vectors(hf), name


def _vectors(hf: HFModelConfig) -> int:
    of_attention = hf.q_lora_rank + hf.kv_lora_rank if hf.q_lora_rank else 2 * hf.head_dim
    return hf.num_hidden_layers * (2 * hf.hidden_size + of_attention) + hf.hidden_size


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Parameters that are not of routed experts, and those; a router's correction bias is none."""
    sizes = {key: x.numel() for key, x in model.named_parameters() if "correction_bias" not in key}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    return sum(sizes.values()) - experts, experts
