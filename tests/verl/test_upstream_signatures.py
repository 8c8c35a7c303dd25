"""Algorithms and utilities have all names of upstream's modules, with its signatures, but those of what is not here."""

from __future__ import annotations

import pytest

from tests.verl.upstream_api import module_differences, upstream_api

# Module -> its names that are not here, by reason: of FSDP or FlashAttention, of a critic, of vision or LoRA, or of
# Megatron models that mindspeed_llm builds and loads.
ABSENT: dict[str, set[str]] = {
    "verl.trainer.ppo.core_algos": {"compute_policy_loss_rollout_correction_wrapper"},
    "verl.trainer.ppo.metric_utils": set(),
    "verl.trainer.ppo.rollout_corr_helper": set(),
    "verl.utils.seqlen_balancing": set(),
    "verl.utils.torch_functional": {
        "logprobs_from_logits_flash_attn",
        "logprobs_from_logits_torch_npu",
        "prepare_decoder_attention_mask",
    },
    "verl.utils.torch_dtypes": set(),
    "verl.utils.fs": set(),
    "verl.utils.tokenizer": set(),
    "verl.utils.model": {
        *("create_huggingface_actor", "create_huggingface_critic", "patch_valuehead_model", "load_valuehead_model"),
        *("check_exclude_modules", "check_target_modules", "get_lora_rank_from_adapter", "extract_multi_modal_inputs"),
        *("normalize_model_name", "normalize_pp_vpp_params", "get_hf_auto_model_class", "get_hf_model_path"),
        *("get_parallel_model_from_config", "get_parallel_gptmodel_from_config", "load_mcore_dist_weights"),
        *("load_megatron_model_weights", "load_megatron_gptmodel_weights", "CausalLMOutputForPPO"),
    },
    "verl.utils.flops_counter": set(),
    "verl.utils.logger.aggregate_logger": set(),
    "verl.utils.import_utils": {"is_sglang_available"},
    "verl.utils.ray_utils": set(),
    "verl.utils.dataset.rl_dataset": set(),
    "verl.experimental.dataset.sampler": set(),
    "verl.utils.tensordict_utils": set(),
    "verl.workers.reward_manager.registry": set(),
    "verl.workers.reward_manager.naive": set(),
    "verl.workers.reward_manager.batch": set(),
    "verl.workers.reward_manager.dapo": set(),
    "verl.workers.reward_manager.abstract": set(),
    "verl.single_controller.base.decorator": set(),
    "verl.base_config": set(),
    "verl.trainer.config.algorithm": set(),
    "verl.utils.rollout_skip": set(),
    "verl.utils.rollout_trace": set(),
    "verl.utils.debug.metrics": set(),
    "verl.utils.profiler.performance": set(),
    "verl.utils.checkpoint.checkpoint_manager": {"BaseCheckpointManager"},
    "verl.utils.reward_score": set(),
    "verl.utils.reward_score.gsm8k": set(),
    "verl.utils.reward_score.math_reward": set(),
    "verl.utils.reward_score.math_dapo": set(),
    "verl.utils.reward_score.math_verify": set(),
    "verl.utils.reward_score.math_batch": set(),
}
# logging.DEBUG is 10, logging.INFO 20: the list has the name, the function the number.
SAME = ("level=10, upstream level=logging.DEBUG", "level=20, upstream level=logging.INFO")


@pytest.mark.parametrize("name", ABSENT)
def test_signatures_are_upstreams(name: str) -> None:
    module = upstream_api()[name]
    wanted = {*module.functions, *module.classes} - ABSENT[name]
    assert wanted and ABSENT[name] <= {*module.functions, *module.classes}
    found = [text for text in module_differences(name, *sorted(wanted)) if not text.endswith(SAME)]
    assert found == []
