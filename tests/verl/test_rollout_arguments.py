"""What a run's config asks of the rollout engine, where it is not the key's own value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config
from tests.tiny_models import CONFIGS
from verl.trainer.config import ConfigError, compose_config, load_config, resolve_config, validate_config
from verl.trainer.config.override_text import override
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import _engine_arguments

KEY = "actor_rollout_ref.rollout.enable_expert_parallel"


@pytest.mark.parametrize(("given", "asked"), [("False", None), ("null", None), ("True", True)])
def test_graphs_are_captured_where_they_can_be(tmp_path: Path, given: str, asked: bool | None) -> None:
    """Upstream's scripts say False on stacks that have no graphs as well; the engine's own False insists."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    rollout = load_config([f"actor_rollout_ref.rollout.enforce_eager={given}"]).actor_rollout_ref.rollout
    assert _engine_arguments(rollout, str(tmp_path), 2)["enforce_eager"] is asked


def test_a_model_without_experts_needs_no_word_about_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_qwen3_config()))
    model = [
        override("actor_rollout_ref.model.path", tmp_path),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    sizes = ["trainer.n_gpus_per_node=2", "data.max_prompt_length=8", "data.max_response_length=8"]
    config, taken = resolve_config(compose_config([*model, *sizes]))
    assert (config.actor_rollout_ref.rollout.enable_expert_parallel, taken) == (False, [])
    assert validate_config(config) == []
    assert not _engine_arguments(config.actor_rollout_ref.rollout, str(tmp_path), 2)["enable_expert_parallel"]
    _, taken = resolve_config(compose_config([*model, *sizes, f"{KEY}=True"]))
    assert [(item.key, item.reason) for item in taken] == [(KEY, "the model has no experts")]


def test_experts_count_under_every_familys_names(tmp_path: Path) -> None:
    """Qwen3-MoE writes ``num_experts`` and no score function: replicas share them, and keys are compared with them."""
    model = CONFIGS["qwen3-moe"]
    (tmp_path / "config.json").write_text(json.dumps(model))
    section = "actor_rollout_ref.actor.megatron.override_transformer_config"
    said = [f"+{section}.num_moe_experts={model['num_experts']}", f"+{section}.moe_router_score_function=softmax"]
    config, _ = resolve_config(
        compose_config([override("actor_rollout_ref.model.path", tmp_path), f"{KEY}=True", *said])
    )
    assert config.actor_rollout_ref.rollout.enable_expert_parallel
    with pytest.raises(ConfigError, match="num_moe_experts is 3, but n_routed_experts"):
        load_config([override("actor_rollout_ref.model.path", tmp_path), f"+{section}.num_moe_experts=3"])


@pytest.mark.parametrize(("family", "has_norms"), [("qwen3", True), ("llama", False), ("qwen2", False)])
def test_norms_of_queries_and_keys_are_the_familys(family: str, has_norms: bool, tmp_path: Path) -> None:
    name = next(name for name in CONFIGS if name.startswith(family))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.qk_layernorm"
    model = override("actor_rollout_ref.model.path", tmp_path)
    load_config([model, f"+{key}={has_norms}"])
    with pytest.raises(ConfigError, match=f"norms of queries and keys of .* is {has_norms}"):
        load_config([model, f"+{key}={not has_norms}"])
