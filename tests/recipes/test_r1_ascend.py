"""The config of the 256-die run equals verl's recipe/r1_ascend line by line."""

from __future__ import annotations

from recipes.common.recipe import ROOT, load_recipe
from tests.recipes.seed_table import check_table, rows_after
from verl.trainer.config import PPOTrainerConfig, load_config

RECIPE = load_recipe("r1_zero")
# Upstream's names and values: its README's tables, then its script.
R1_ASCEND = {
    "learning rate": "1e-6",
    "learning rate schedule": "constant",
    "iterations": "70",
    "total_epochs": "1",
    "global batchsize": "512",
    "n_samples": "16",
    "prompt_max_len": "1024",
    "response_max_len": "2048",
    "prompt": "a system sentence, the problem between the User and Assistant tokens",
    "rule reward": "format + acc",
    "adv_estimator": "grpo",
    "use_kl_loss": "True",
    "kl-coef": "0.001",
    "kl_loss_type": "low_var_kl",
    "kl_ctrl.kl_coef": "0.0",
    "ppo_epochs": "1",
    "ppo_mini_batch_size": "512",
    "ppo_micro_batch_size_per_gpu": "1",
    "old_log_prob = log_prob.detach()": "edited into megatron_actor.py",
    "tensor_model_parallel_size": "1",
    "pipeline_model_parallel_size": "8",
    "expert_model_parallel_size": "32",
    "pipeline_num_transformer_layers": "[[6],[8],[8],[8],[8],[8],[8],[7]]",
    "swap_optimizer": "True",
    "optimizer_offload": "False",
    "param_offload": "True",
    "grad_offload": "True",
    "use_dist_checkpointing": "True",
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": "8",
    "multi_head_latent_attention": "True",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": "True",
    "use_flash_attn": "True",
    "use_fused_rotary_pos_emb": "True",
    "use_fused_swiglu": "True",
    "rope yarn": "factor 40, mscale 1, mscale_all_dim 1",
    "ref.log_prob_micro_batch_size_per_gpu": "4",
    "rollout.log_prob_micro_batch_size_per_gpu": "4",
    "temperature": "1.0",
    "top_k": "-1",
    "top_p": "1",
    "rollout.tensor_model_parallel_size": "2",
    "VLLM_DP_SIZE": "128",
    "gpu_memory_utilization": "0.8",
    "enforce_eager": "False",
    "free_cache_engine": "True",
    "enable_chunked_prefill": "True",
    "max_num_seqs": "64",
    "max_num_batched_tokens": "1024",
    "val_kwargs.temperature": "1",
    "val_kwargs.do_sample": "True",
    "val_kwargs.n": "1",
    "val_before_train": "True",
    "test_freq": "5",
    "save_freq": "-1",
    "nnodes": "16",
    "n_gpus_per_node": "16",
}


def config_of(*overrides: str) -> PPOTrainerConfig:
    return load_config(overrides, config_name="r1_ascend_671b_256die", config_dir=RECIPE.config_dir)


def test_the_config_equals_the_recipe_line_by_line() -> None:
    page = (ROOT / "docs" / "upstream" / "r1_ascend.md").read_text(encoding="utf-8")
    check_table(rows_after(page, "## `r1_ascend_671b_256die`"), R1_ASCEND, config_of)
