"""Every further estimator and loss trains a model two steps in a real job, two updates a step; so do a user's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.ray_workers import ray_with_forked_workers
from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import prepare
from verl.trainer.config.override_text import override

# By upstream's signatures, with exactly the parameters that upstream's callers give.
LIBRARY = """
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.trainer.config.override_text import override


@register_adv_est("centred")
def centred(token_level_rewards, response_mask, config=None, index=None, **kwargs):
    assert len(index) == len(response_mask) and config.gamma == 1.0 and not kwargs.keys() & {"values"}
    rewards = token_level_rewards.sum(-1, keepdim=True)
    advantages = (rewards - rewards.mean()) * response_mask
    return advantages, advantages


@register_policy_loss("plain")
def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    ratio = (log_prob - old_log_prob).exp()
    return agg_loss(-advantages * ratio, response_mask, loss_agg_mode), {"actor/largest_ratio": ratio.max()}
"""
ACTOR = "actor_rollout_ref.actor"
PAIRS = (("gpg", "gpg"), ("opo", "clip_cov"), ("grpo_passk", "kl_cov"), ("rloo_vectorized", "geo_mean"))


@pytest.mark.slow  # tests/verl/test_row_losses.py updates with each loss, test_r1_dynamic_sampling.py with a user's
@pytest.mark.usefixtures("registries_as_before")
def test_every_pair_trains(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    library = tmp_path / "mine.py"
    library.write_text(LIBRARY)
    with ray_with_forked_workers(2):
        for estimator, loss in (*PAIRS, ("centred", "plain")):
            folder = tmp_path / loss
            overrides = [
                f"algorithm.adv_estimator={estimator}",
                f"{ACTOR}.policy_loss.loss_mode={loss}",
                f"{ACTOR}.ppo_mini_batch_size=4",
                "reward_model.num_workers=1",
                override("actor_rollout_ref.model.external_lib", library),
            ]
            fit(in_process_config(prepared, folder, 2, 2, *overrides))
            steps = [step for step in read_metrics(folder) if "actor/pg_loss" in step]
            assert len(steps) == 2, loss
            assert all(math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] >= 0 for step in steps), loss
            assert any(step["actor/grad_norm"] > 0 for step in steps), loss
            assert all(("actor/largest_ratio" in step) is (loss == "plain") for step in steps)
