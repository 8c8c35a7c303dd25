"""The configs of the two cann scripts equal upstream's parameters line by line, and their scripts choose them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT, load_recipe
from tests.mindspeed_llm.test_weight_plan import DEEPSEEK_V3
from tests.recipes.seed_table import check_table, rows_after
from tools.launch import __main__ as launch
from tools.launch.job import Job, resolve_config
from tools.launch.settings import read_settings
from tools.launch.stages import stages
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config

RECIPE = load_recipe("r1_zero")
PAGE = (ROOT / "docs" / "upstream" / "cann_recipes.md").read_text(encoding="utf-8")
# Upstream's names and values, as its scripts and the files that they start set them.
CANN_TRUE_WEIGHT = {
    "train_batch_size": "512",
    "n": "16",
    "max_prompt_length": "1024",
    "max_response_length": "3072",
    "filter_overlong_prompts": "True",
    "truncation": "error",
    "prompt": "the problem as it is",
    "reward": "0 or 1: the answer as a substring, or an equal box",
    "lr": "1e-6",
    "clip_grad": "1",
    "adam betas": "0.9, 0.95",
    "lr_decay_style": "constant",
    "min_lr": "0",
    "ppo_mini_batch_size": "512",
    "ppo_micro_batch_size_per_gpu": "1",
    "recompute_old_log_prob": "False",
    "clip_ratio": "0.2",
    "clip_ratio_c": "3.0",
    "loss_agg_mode": "token-mean",
    "use_kl_loss": "True",
    "kl_loss_coef": "0.001",
    "kl_loss_type": "low_var_kl",
    "kl_ctrl.kl_coef": "0.001",
    "adv_estimator": "grpo",
    "tensor_model_parallel_size": "4",
    "pipeline_model_parallel_size": "8",
    "expert_model_parallel_size": "8",
    "moe_tp_extend_ep": "True",
    "num_layer_list": "[7,7,8,8,8,8,8,7]",
    "sequence_parallel": "True",
    "swap_optimizer": "True",
    "optimizer_offload": "False",
    "param_offload": "True",
    "grad_offload": "True",
    "use_dist_checkpointing": "True",
    "fix_router": "False",
    "overlap_grad_reduce": "True",
    "overlap_param_gather": "True",
    "moe_alltoall_overlap_comm": "True",
    "moe_router_bias_update_rate": "0.001",
    "moe_permutation_async_comm": "True",
    "moe_grouped_gemm": "True",
    "use_flash_attn": "True",
    "use_fused_rmsnorm": "True",
    "use_fused_swiglu": "True",
    "use_fused_rotary_pos_emb": "True",
    "use_fused_moe_token_permute_and_unpermute": "True",
    "variable_seq_lengths": "True",
    "attention_dropout": "0",
    "hidden_dropout": "0",
    "attention_softmax_in_fp32": "True",
    "init_method_std": "0.01",
    "enable_gradient_checkpointing": "True",
    "activations_checkpoint_granularity": "full",
    "activations_checkpoint_method": "block",
    "activations_checkpoint_num_layers": "8",
    "trust_remote_code": "True",
    "ref.log_prob_micro_batch_size_per_gpu": "8",
    "rollout.log_prob_micro_batch_size_per_gpu": "4",
    "rollout.tensor_model_parallel_size": "2",
    "rollout.gpu_memory_utilization": "0.8",
    "rollout.enforce_eager": "False",
    "rollout.max_num_batched_tokens": "1024",
    "rollout.max_num_seqs": "64, computed",
    "rollout.enable_chunked_prefill": "True",
    "rollout.enable_prefix_caching": "False",
    "rollout.enable_expert_parallel": "True",
    "rollout.ignore_eos": "False",
    "graph_batch_sizes": "[64]",
    "enable_kv_nz": "False",
    "temperature": "0.9",
    "top_k": "50",
    "top_p": "0.9",
    "balance_batch": "False",
    "device": "npu",
    "nnodes": "16",
    "n_gpus_per_node": "16",
    "val_before_train": "False",
    "save_freq": "-1",
    "test_freq": "-1",
    "total_epochs": "1",
    "D2D_DATA_TRANSFER": "1",
    "NO_ALL_TO_ALL_RESHARD": "not set",
    "ROLLOUT_REBALANCE_ENABLE": "not set",
    "VLLM_DP_SIZE": "64",
    "VLLM_ENABLE_GRAPH_MODE": "1",
    "VLLM_ENABLE_FIX_ROUTE": "0",
    "HCCL_CONNECT_TIMEOUT": "600",
    "HCCL_EXEC_TIMEOUT": "600",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_OP_EXPANSION_MODE": "AIV",
    "HCCL_BUFFSIZE": "300",
    "HCCL_IF_BASE_PORT": "64247",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "MALLOC_MMAP_THRESHOLD_": "512768",
    "TASK_QUEUE_ENABLE": "2",
    "ASCEND_LAUNCH_BLOCKING": "0",
    "ASCEND_GLOBAL_EVENT_ENABLE": "0",
    "ASCEND_GLOBAL_LOG_LEVEL": "3",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "0",
    "LD_PRELOAD": "jemalloc",
    "MASTER_PORT": "29444",
    "VLLM_USE_V1, VLLM_VERSION, VLLM_ENABLE_MC2, VLLM_ASCEND_*": "set",
    "PRINT_MEMORY, PROFILE_UPDATE": "1, 0",
}
CANN_RANDOM_INIT = {
    "fix_router": "True",
    "VLLM_ENABLE_FIX_ROUTE": "1",
    "load_weight": "False",
    "ref.load_weight": "False",
    "use_dist_checkpointing": "False",
    "ignore_eos": "True",
    "VLLM_DP_SIZE": "128",
    "enable_gradient_checkpointing": "True",
    "gradient_checkpointing_kwargs": "not set",
    "steps measured": "5",
    "DIST_CKPT_PATH": "not set",
}


def config_of(name: str, *overrides: str) -> PPOTrainerConfig:
    return load_config(overrides, config_name=name, config_dir=RECIPE.config_dir)


@pytest.mark.parametrize(
    ("name", "heading", "seed"),
    [
        ("cann_true_weight_671b_256die", "## `cann_true_weight_671b_256die`", CANN_TRUE_WEIGHT),
        ("cann_random_init_671b_256die", "## `cann_random_init_671b_256die`", CANN_RANDOM_INIT),
    ],
)
def test_configs_equal_the_scripts_line_by_line(name: str, heading: str, seed: dict[str, str]) -> None:
    check_table(rows_after(PAGE, heading), seed, partial(config_of, name))


@pytest.mark.parametrize(
    ("script", "rollout"),
    [("true_weight", "rollout:  2 engines of TP2 DP64 EP128"), ("random_init", "rollout:  TP2 DP128 EP256")],
)
def test_the_plans_of_256_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, rollout: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    environment = {
        "CONFIG_NAME": f"cann_{script}_671b_256die",
        "MASTER_ADDR": "192.0.2.77",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "MODEL_PATH": str(tmp_path / "model"),
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    unused = "actor_rollout_ref.model.use_fused_kernels=True"
    assert launch.main(["r1_zero", "--print-plan", unused]) == 0
    plan = capsys.readouterr().out
    assert plan.count("taken without effect:") == 1 and f"  {unused}: trainer.train_ops decides" in plan
    assert "16 x 16 npu devices" in plan and plan.count("-m ray.scripts.scripts start --block") == 16
    assert "training: TP4 PP8 DP8 EP32, layers per stage 7,7,8,8,8,8,8,7" in plan
    assert rollout in plan
    assert "random (actor.megatron.load_weight is False)" in plan or script == "true_weight"


# On a machine without NPUs the benchmark is that of the tiny model.
SCRIPTS = [("true_weight", "cann_true_weight_671b_256die"), ("random_init", "cann_random_init_tiny")]


@pytest.mark.parametrize(("script", "config"), SCRIPTS)
def test_the_scripts_start_the_launcher_with_their_configs(tmp_path: Path, script: str, config: str) -> None:
    """An interpreter that says what it is started with."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$CONFIG_NAME; $OUTPUT_DIR; $*"\n')
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("CONFIG_NAME", "OUTPUT_DIR")}
    path = RECIPE.config_dir.parent / f"train_deepseekv3_256die_{script}.sh"
    environment = kept | {"SETUP": "no", "VENV_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(path), "--help"], env=environment, capture_output=True, text=True, check=True)
    folder = ROOT / "outputs" / "random_init" if config.endswith("tiny") else ""
    assert done.stdout == f"{config}; {folder}; -m tools.launch r1_zero --help\n"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "config"), SCRIPTS)
def test_the_scripts_choose_their_configs(tmp_path: Path, script: str, config: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("CONFIG_NAME", "OUTPUT_DIR")}
    path = RECIPE.config_dir.parent / f"train_deepseekv3_256die_{script}.sh"
    environment = kept | {"SETUP": "no", "VENV_DIR": sys.prefix, "MASTER_ADDR": "192.0.2.77", "COLUMNS": "200"}
    if config.endswith("tiny"):
        del environment["MASTER_ADDR"]
    done = subprocess.run(
        ["bash", str(path), "--print-plan"], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(rf"Plan: {config} on", done.stdout), done.stdout[:500]
    if config.endswith("tiny"):
        assert f"OUTPUT_DIR={ROOT / 'outputs' / 'random_init'}" in done.stdout


def test_the_tiny_benchmark_has_what_the_large_one_has(tmp_path: Path) -> None:
    tiny, large = config_of("cann_random_init_tiny"), config_of("cann_random_init_671b_256die")
    assert validate_config(tiny) == validate_config(large) == []
    for config in (tiny, large):
        actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
        assert not (actor.load_weight or actor.megatron.load_weight)
        assert actor.megatron.fix_router and rollout.fix_router and rollout.ignore_eos
        assert not (trainer.save_last or trainer.test_last or trainer.export_hf)
        assert trainer.save_freq == trainer.test_freq == -1
    alone = config_of("cann_random_init_tiny", "trainer.n_gpus_per_node=1")
    assert validate_config(alone) == [] and alone.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 1
    environment = {"CONFIG_NAME": "cann_random_init_tiny", "OUTPUT_DIR": str(tmp_path)}
    settings = read_settings(RECIPE, [], environment)
    commands = {stage.name: stage for stage in stages(Job(settings, resolve_config(settings)))}
    assert commands["base_model"].command[-2:] == ("--num-steps", "2"), (
        "nothing is learned for weights that are not read"
    )
    assert "initialises at random" in str(commands["sharding"].skip_reason)
