"""Knobs of the training engine: each reaches the engine's own config, and a wrong value is told at the start."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config, parse_hf_config
from megatron.core.ops import resolve
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.transformer import transformer_config
from megatron.core.transformer.transformer_config import TransformerConfig
from mindspeed_llm.model import to_transformer_config
from tests.mindspeed_llm.tiny import tiny_hf_config
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.config.override_text import override
from verl.workers.config import overrides
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.engine_setup import engine_problems, model_fields, optimizer_config, trained_model

ACTOR = "actor_rollout_ref.actor"
ENGINE = f"{ACTOR}.megatron"
TRANSFORMER = f"{ENGINE}.override_transformer_config"
OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"


def _config(*given: str) -> PPOTrainerConfig:
    return load_config([f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ENGINE}.dtype=float32", *given])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tiny_hf_config()))
    return path


def _problems(model_path: Path, *given: str) -> str:
    """Everything that is said before a process starts."""
    config = _config(override("actor_rollout_ref.model.path", model_path), "data.max_prompt_length=8", *given)
    found = validate_config(config)
    if not found:
        found = engine_problems(config.actor_rollout_ref, config.trainer.world_size, load_hf_config(model_path))
    return "\n".join(found)


def test_every_axis_reaches_the_layout() -> None:
    config = _config(
        "trainer.n_gpus_per_node=32",
        f"{ENGINE}.tensor_model_parallel_size=2",
        f"{ENGINE}.pipeline_model_parallel_size=4",
        f"{ENGINE}.virtual_pipeline_model_parallel_size=2",
        f"{ENGINE}.context_parallel_size=2",
        f"{ENGINE}.expert_model_parallel_size=2",
        f"{ENGINE}.expert_tensor_parallel_size=2",
        f"{TRANSFORMER}.num_layers_in_first_pipeline_stage=4",
        f"{TRANSFORMER}.num_layers_in_last_pipeline_stage=2",
        f"{TRANSFORMER}.noop_layers='3,12'",
    )
    assert validate_config(config) == []
    layout = config.actor_rollout_ref.actor.megatron.layout(32)
    assert layout == ParallelLayout(
        world_size=32,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        num_layers_in_first_pipeline_stage=4,
        num_layers_in_last_pipeline_stage=2,
        noop_layers=(3, 12),
    )
    assert layout.data_parallel_size == 2
    assert layout.stage_layer_counts(12) == (4, 4, 4, 2)


def test_split_down_projections_reach_the_layout_and_must_divide(model_path: Path) -> None:
    key = "mla_down_proj_column_parallel"
    tp2, split = [f"{ENGINE}.tensor_model_parallel_size=2"], [f"{TRANSFORMER}.{key}=True"]
    unlike = f"actor_rollout_ref.ref.megatron.override_transformer_config.{key}=False"
    rollout = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    assert _config(*split).actor_rollout_ref.actor.megatron.layout(2).mla_down_proj_column_parallel
    assert _problems(model_path, *tp2, *split, *rollout) == ""
    assert f"ref.megatron: {key} is False and the actor's True" in _problems(model_path, *tp2, *split, unlike, *rollout)
    config = json.loads((model_path / "config.json").read_text())
    odd = model_path.parent / "odd"
    odd.mkdir(exist_ok=True)
    (odd / "config.json").write_text(json.dumps(config | {"q_lora_rank": 33}))
    assert "q_lora_rank 33 does not divide over tensor_model_parallel_size 2" in _problems(odd, *tp2, *split, *rollout)


def test_forms_of_kernels_are_asked_for_of_the_one_op_table(model_path: Path) -> None:
    keys = ("mla_fa_without_pad", "gemm_gradient_accumulation_fusion", "tp_comm_overlap")
    given = [f"{TRANSFORMER}.{key}=True" for key in keys]
    assert _config().actor_rollout_ref.actor.megatron.op_choices == {}
    assert _config(*given).actor_rollout_ref.actor.megatron.op_choices == dict.fromkeys(keys, True)
    assert _problems(model_path, *given) == ""
    unlike = f"actor_rollout_ref.ref.megatron.override_transformer_config.{keys[0]}=False"
    assert f"ref.megatron: {keys[0]} is False and the actor's True" in _problems(model_path, *given, unlike)
    assert f"{keys[0]} is 'yes'; expected True or False" in _problems(model_path, f"{TRANSFORMER}.{keys[0]}=yes")


def test_fp8_is_asked_for_whole_and_where_it_is(model_path: Path) -> None:
    fp8, recipe = f"{TRANSFORMER}.fp8=e4m3", f"{TRANSFORMER}.fp8_recipe=blockwise"
    choices = _config(fp8, recipe).actor_rollout_ref.actor.megatron.op_choices
    assert choices == {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert _problems(model_path, fp8, recipe, "trainer.device=cuda") == ""
    problems = _problems(model_path, fp8, recipe, "trainer.device=cpu")
    assert "override_transformer_config.fp8 is 'e4m3', but trainer.device is cpu" in problems
    assert "fp8 is e4m3 and fp8_recipe None; give both" in _problems(model_path, fp8, "trainer.device=cuda")
    assert "fp8 is None and fp8_recipe blockwise; give both" in _problems(model_path, recipe)
    assert "fp8 is 'hybrid'; expected one of e4m3" in _problems(model_path, f"{TRANSFORMER}.fp8=hybrid", recipe)
    assert "fp8 and cp_send_latents exclude each other" in _problems(
        model_path, fp8, recipe, f"{TRANSFORMER}.cp_send_latents=True", "trainer.device=cuda"
    )
    with pytest.raises(ValueError, match="fp8=e4m3, but the train ops of .*cpu_ops.* no such form"):
        resolve("megatron.core.ops.cpu:cpu_ops", choices)


def test_every_knob_of_the_model_reaches_its_config() -> None:
    given: dict[str, Any] = {
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj", "moe_act"],
        "cp_comm_type": "a2a",
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp64",
        "moe_token_dispatcher_type": "allgather",
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
    }
    keys = [f"{TRANSFORMER}.{key}={value}" for key, value in given.items()]
    models = _config(
        *keys, "actor_rollout_ref.model.override_config.moe_config.freeze_moe_router=True"
    ).actor_rollout_ref
    hf = parse_hf_config(tiny_hf_config() | {"num_nextn_predict_layers": 1}, source="tiny")
    made = to_transformer_config(
        trained_model(hf, models.actor.megatron),
        layout=models.actor.megatron.layout(1),
        **model_fields(models, models.actor.megatron),
    )
    expected = given | {"recompute_modules": ("mla_up_proj", "moe_act"), "freeze_moe_router": True}
    assert {key: getattr(made, key) for key in expected} == expected
    assert made.calculate_per_token_loss and made.params_dtype == torch.float32


def test_keys_and_modules_are_the_engines() -> None:
    assert overrides.RECOMPUTE_MODULES == transformer_config.RECOMPUTE_MODULES
    assert set(overrides._FIELDS) <= {field.name for field in fields(TransformerConfig)}
    assert set(overrides.OPTIMIZER_OVERRIDES) <= {field.name for field in fields(OptimizerConfig)}


def test_state_on_the_host_and_in_small_dtypes_reaches_the_optimizer() -> None:
    keys = ("optimizer_cpu_offload=True", "optimizer_offload_fraction=0.5", "overlap_cpu_optimizer_d2h_h2d=True")
    keys += ("use_precision_aware_optimizer=True", "exp_avg_dtype=bf16", "on_non_finite_grads=stop")
    config = _config(*(f"{OPTIMIZER}.{key}" for key in keys))
    assert validate_config(config) == []
    actor = config.actor_rollout_ref.actor
    made = optimizer_config(actor.optim, actor.megatron)
    assert (made.optimizer_cpu_offload, made.optimizer_offload_fraction, made.exp_avg_dtype) == (
        True,
        0.5,
        torch.bfloat16,
    )
    assert (made.overlap_cpu_optimizer_d2h_h2d, made.on_non_finite_grads) == (True, "stop")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"{TRANSFORMER}.recompute_modules=[mla]", "expected a list of mla_up_proj, core_attn"),
        (f"{TRANSFORMER}.recompute_granularity=some", "is 'some'; expected one of full, selective"),
        (f"{TRANSFORMER}.recompute_granularity=full", "recompute_method is None"),
        (f"{TRANSFORMER}.recompute_num_layers=0", "expected a whole number, at least 1"),
        (f"{TRANSFORMER}.cp_comm_type=ring", "expected one of p2p, all_gather, a2a"),
        (f"{TRANSFORMER}.moe_aux_loss_coeff=-1", "expected a number, at least 0"),
        (f"{TRANSFORMER}.moe_z_loss_coeff=[1]", "expected a number, at least 0"),
        (f"{TRANSFORMER}.moe_router_load_balancing_type=sinkhorn", "expected one of aux_loss, seq_aux_loss, none"),
        (f"{TRANSFORMER}.moe_router_dtype=fp16", "expected one of fp32, fp64, bf16"),
        (f"{TRANSFORMER}.moe_token_dispatcher_type=ring", "expected one of alltoall, allgather, flex"),
        (
            f"{TRANSFORMER}.moe_token_dispatcher_type=flex trainer.device=cuda {ENGINE}.dtype=float32",
            "megatron.dtype is float32; moe_token_dispatcher_type=flex (DeepEP) needs bfloat16",
        ),
        (
            f"{TRANSFORMER}.moe_token_dispatcher_type=flex trainer.device=cuda {ENGINE}.expert_tensor_parallel_size=2",
            "expert_tensor_parallel_size is 2; moe_token_dispatcher_type=flex (DeepEP) needs 1",
        ),
        (f"{TRANSFORMER}.mtp_num_layers=2", "mtp_num_layers is 2; config.json says that the checkpoint has"),
        (f"{TRANSFORMER}.noop_layers='a,b'", "expected numbers of layer slots"),
        (f"{TRANSFORMER}.noop_layers=[99]", "must be different numbers in 0.."),
        (f"{TRANSFORMER}.num_layers_in_first_pipeline_stage=two", "expected a whole number, at least 1"),
        (
            f"{TRANSFORMER}={{cp_comm_type:a2a}} {ENGINE}.context_parallel_size=8",
            "num_attention_heads 4 does not divide over tensor_model_parallel_size 1 times context_parallel_size 8",
        ),
        (f"{ENGINE}.virtual_pipeline_model_parallel_size=2", "chunks need at least 2 stages"),
        (f"{ENGINE}.context_parallel_size=3", "world size 8 is not a multiple of TP 1 x PP 1 x CP 3"),
        (f"{ENGINE}={{moe_tp_extend_ep:true,expert_tensor_parallel_size:2}}", "exclude each other"),
        ("actor_rollout_ref.ref.megatron.context_parallel_size=2", "the reference lives in the actor's processes"),
        (
            "actor_rollout_ref.ref.megatron.override_transformer_config.noop_layers='1'",
            "noop_layers is (1,) and the actor's ()",
        ),
        (
            "actor_rollout_ref.ref.megatron.override_transformer_config.moe_router_dtype=x",
            "ref.megatron.override_transformer_config.moe_router_dtype is 'x'",
        ),
        (f"{ENGINE}.override_ddp_config.check_for_nan_in_grad=1", "expected True or False"),
        (f"{OPTIMIZER}.optimizer_offload_fraction=2", "at least 0 and at most 1"),
        (f"{OPTIMIZER}.exp_avg_dtype=fp8", "expected one of fp32, bf16"),
        (f"{OPTIMIZER}.exp_avg_dtype=bf16", "needs use_precision_aware_optimizer=True"),
        (f"{OPTIMIZER}.lr=1", "override_optimizer_config.lr is not known here; known: exp_avg_dtype"),
        (f"{OPTIMIZER}={{use_precision_aware_optimizer:true,exp_avg_sq_dtype:bf16}}", "adam_beta2 is 0.999"),
        (f"{ACTOR}.router_replay.mode=R1", "router_replay.mode is 'R1'; expected one of auto, disabled, R2, R3"),
        (f"{ACTOR}.router_replay.mode=R3", "set actor_rollout_ref.rollout.enable_rollout_routing_replay=True"),
        (
            "actor_rollout_ref.model.override_config.moe_config.freeze=True",
            "moe_config.freeze is not known here; known: max_position_embeddings, "
            "model_config.max_position_embeddings, moe_config.freeze_moe_router",
        ),
        ("actor_rollout_ref.model.override_config.vision_config=1", "known: max_position_embeddings"),
    ],
)
def test_a_wrong_value_is_told(model_path: Path, override: str, told: str) -> None:
    assert told in _problems(model_path, *override.split(" "))


def test_the_state_lives_on_the_host_in_one_way(model_path: Path) -> None:
    found = _problems(model_path, f"{ENGINE}.swap_optimizer=True", f"{OPTIMIZER}.optimizer_cpu_offload=True")
    assert "both keep the state on the host; choose one" in found


def test_layers_of_the_ends_are_counted_with_the_model() -> None:
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=3,
        override_transformer_config={"pipeline_num_transformer_layers": [[2, 2], [3, 3], [1, 1]]},
    )
    assert engine.layer_counts() == (4, 6, 2)
    assert engine.problems("engine") == []
    assert (
        "one list of layer counts"
        in McoreEngineConfig(override_transformer_config={"pipeline_num_transformer_layers": [2, 2]}).problems(
            "engine"
        )[0]
    )


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64"], "disabled"),
        (["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32"], "R2"),
        ([f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.router_replay.mode=disabled"], "disabled"),
        ([f"{ACTOR}.ppo_epochs=2", "algorithm.rollout_correction.bypass_mode=True"], "disabled"),
        (["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], "R3"),
    ],
)
def test_replay_is_on_where_it_costs_no_other_pass(overrides: list[str], mode: str) -> None:
    assert _config(*overrides).actor_rollout_ref.actor.router_replay.mode == mode


def test_replay_computes_old_log_probs_even_on_policy() -> None:
    actor = _config(f"{ACTOR}.router_replay.mode=R2").actor_rollout_ref.actor
    assert actor.needs_old_log_prob(actor.ppo_mini_batch_size)
