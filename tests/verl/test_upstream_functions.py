"""Upstream's tools around a trainer: their names and signatures, and results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.verl.upstream_api import module_differences
from verl import DataProto
from verl.trainer.ppo.core_algos import AdaptiveKLController
from verl.trainer.ppo.step_functions import apply_kl_penalty, compute_advantage
from verl.utils.groupwise import as_torch_index, group_mean_std

NAMES = {
    "verl.utils": ("as_torch_index", "group_mean_std", "hf_tokenizer"),
    "verl.utils.groupwise": ("as_torch_index", "group_mean_std"),
    "verl.utils.import_utils": ("import_external_libs", "load_extern_type"),
}


@pytest.mark.parametrize("module", sorted(NAMES))
def test_signatures_are_upstreams(module: str) -> None:
    assert module_differences(module, *NAMES[module]) == []


def test_groups_are_numbered_and_their_moments_computed() -> None:
    assert as_torch_index([2, 2, 5, 7, 5, 2]).tolist() == [0, 0, 1, 2, 1, 0]
    assert as_torch_index(np.array(["b", "a", "b"], dtype=object)).tolist() == [0, 1, 0]
    assert as_torch_index(torch.tensor([1.0000001, 2.0, 1.0])).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="one group per row"):
        as_torch_index(np.zeros((2, 2)))
    mean, std, count = group_mean_std(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1]))
    assert mean.tolist() == [2.0, 0.0] and count.tolist() == [2.0, 1.0]
    torch.testing.assert_close(std, torch.tensor([2.0**0.5, 1.0]))


def rewarded() -> DataProto:
    return DataProto.from_dict(
        {
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, -9.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0], [-2.0, -1.0]]),
        },
        {"uid": ["p", "p"]},
    )


def test_kl_is_taken_from_the_reward_and_steers_its_coefficient() -> None:
    data = rewarded()
    control = AdaptiveKLController(init_kl_coef=0.1, target_kl=0.5, horizon=10)
    data, metrics = apply_kl_penalty(data, kl_ctrl=control)
    expected = torch.tensor([[-0.05, 1.0], [1.9, 0.0]])  # the KL is 0.5, 0 and 1; a padded token has none
    torch.testing.assert_close(data.batch["token_level_rewards"], expected)
    assert metrics == {"actor/reward_kl_penalty": 0.625, "actor/reward_kl_penalty_coeff": 0.1}
    assert control.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))  # 0.625 / 0.5 - 1, clipped to 0.2; two rows


def test_advantages_of_groups_and_of_values() -> None:
    data = rewarded()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    dr_grpo = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert dr_grpo.batch["advantages"].tolist() == [[-0.5, -0.5], [0.5, 0.0]]  # sums 1 and 2, mean 1.5
    data.batch["values"] = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    gae = compute_advantage(data, "gae", gamma=1.0, lam=0.0)  # returns are r + V of the next token
    assert gae.batch["returns"].tolist()[0] == [0.25, 1.0] and gae.batch["returns"][1, 0] == 2.0


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("verl.single_controller.base", "Critic"),
        ("verl.utils.import_utils", "is_sglang_available"),
        ("verl.trainer.ppo.ray_trainer", "FSDPWorker"),
    ],
)
def test_names_of_what_is_not_here_do_not_exist(module: str, name: str) -> None:
    with pytest.raises(ImportError):
        exec(f"from {module} import {name}")
