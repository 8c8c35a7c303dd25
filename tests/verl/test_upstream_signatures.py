"""What plug-ins use of upstream's modules has its names and signatures."""

from __future__ import annotations

import pytest

from tests.verl.upstream_api import module_differences, upstream_api

# Module -> its names that plug-ins use; an empty tuple stands for all of upstream's.
NAMES: dict[str, tuple[str, ...]] = {
    "verl.trainer.config.algorithm": ("KLControlConfig", "FilterGroupsConfig"),
    "verl.trainer.ppo.core_algos": (
        *(
            "AdaptiveKLController",
            "AdvantageEstimator",
            "FixedKLController",
            "agg_loss",
            "compute_gae_advantage_return",
        ),
        *("compute_gpg_outcome_advantage", "compute_grpo_outcome_advantage", "compute_grpo_passk_outcome_advantage"),
        *("compute_grpo_vectorized_outcome_advantage", "compute_opo_outcome_advantage"),
        *("compute_policy_loss_clip_cov", "compute_policy_loss_geo_mean", "compute_policy_loss_gpg"),
        *("compute_policy_loss_gspo", "compute_policy_loss_kl_cov", "compute_policy_loss_vanilla"),
        *("compute_reinforce_plus_plus_baseline_outcome_advantage", "compute_remax_outcome_advantage"),
        *("compute_reinforce_plus_plus_outcome_advantage", "compute_rloo_outcome_advantage", "get_adv_estimator_fn"),
        *("compute_rloo_vectorized_outcome_advantage", "get_kl_controller", "get_policy_loss_fn", "kl_penalty"),
        *("kl_penalty_forward", "register_adv_est", "register_policy_loss"),
    ),
    "verl.utils.torch_functional": (
        *("masked_mean", "masked_sum", "masked_var", "masked_whiten", "pad_sequence_to_length", "postprocess_data"),
    ),
    "verl.utils.tokenizer": ("hf_tokenizer", "set_pad_token_id"),
    "verl.utils.model": ("compute_position_id_with_mask",),
    "verl.utils.import_utils": ("import_external_libs", "load_extern_type"),
    "verl.utils.dataset.rl_dataset": (),
    "verl.experimental.dataset.sampler": (),
    "verl.workers.reward_manager.registry": (),
    "verl.workers.reward_manager.naive": (),
    "verl.workers.reward_manager.batch": (),
    "verl.workers.reward_manager.dapo": (),
    "verl.workers.reward_manager.abstract": (),
    "verl.utils.reward_score": (),
    "verl.utils.reward_score.gsm8k": (),
    "verl.utils.reward_score.math_reward": (),
    "verl.utils.reward_score.math_dapo": (),
    "verl.utils.reward_score.math_verify": (),
    "verl.utils.reward_score.math_batch": (),
}
# logging.DEBUG is 10, logging.INFO 20: the list has the name, the function the number.
SAME = ("level=10, upstream level=logging.DEBUG", "level=20, upstream level=logging.INFO")


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_upstreams(name: str) -> None:
    module = upstream_api()[name]
    wanted = NAMES[name] or sorted({*module.functions, *module.classes})
    assert [text for text in module_differences(name, *wanted) if not text.endswith(SAME)] == []
