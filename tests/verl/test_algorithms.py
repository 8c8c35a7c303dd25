"""Advantages, losses and KL estimates against formulas written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verl.advantages import estimate_advantages
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import KLControlConfig
from verl.trainer.ppo.core_algos import (
    agg_loss,
    get_adv_estimator_fn,
    get_kl_controller,
    get_policy_loss_fn,
    kl_penalty,
    register_adv_est,
    token_loss_weights,
)
from verl.trainer.ppo.policy_losses import token_form
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.trainer.ppo.step_functions import compute_advantage
from verl.workers.config import ActorConfig
from verl.workers.config.actor import KL_TYPES, LOSS_AGG_MODES

GROUPS = ["a", "a", "b", "a", "b", "c"]
SCORES = [1.0, 0.0, 0.33, 0.67, 0.33, 0.5]


def _batch() -> tuple[Tensor, Tensor]:
    """token_level_rewards and response_mask [6, 4]: the score stands on the last token of each response."""
    lengths = torch.tensor([4, 2, 3, 1, 4, 2])
    mask = (torch.arange(4)[None] < lengths[:, None]).float()
    rewards = torch.zeros(6, 4)
    rewards[torch.arange(6), lengths - 1] = torch.tensor(SCORES)
    return rewards, mask


def _groups_of(scores: list[float]) -> dict[str, list[float]]:
    return {g: [s for s, other in zip(scores, GROUPS, strict=True) if other == g] for g in set(GROUPS)}


def test_grpo_is_the_score_whitened_in_its_group() -> None:
    rewards, mask = _batch()
    advantages, returns = get_adv_estimator_fn("grpo")(rewards, mask, GROUPS)
    for row, group in enumerate(GROUPS):
        members = _groups_of(SCORES)[group]
        mean = sum(members) / len(members) if len(members) > 1 else 0.0
        variance = sum((s - mean) ** 2 for s in members) / (len(members) - 1) if len(members) > 1 else 1.0
        expected = (SCORES[row] - mean) / (math.sqrt(variance) + 1e-6)
        assert torch.allclose(advantages[row], expected * mask[row], atol=1e-5)
    assert torch.equal(advantages, returns)
    assert advantages[2].abs().max() == 0  # equal scores in a group teach nothing


def test_gdpo_normalises_each_part_in_its_group_and_their_sum_over_the_batch() -> None:
    rewards, mask = _batch()
    random = np.random.default_rng(0)
    parts = {"right": random.integers(0, 2, 6).astype(float), "form": 100 * random.normal(size=6), "other": np.ones(6)}
    parts["right"][3] = np.nan  # it could not be graded
    total = np.zeros(6)
    for name in ("right", "form"):
        values = np.where(np.isnan(parts[name]), 0.0, parts[name])
        for group in set(GROUPS):
            rows = [row for row, other in enumerate(GROUPS) if other == group]
            members = values[rows]
            normalised = (members - members.mean()) / (members.std(ddof=1) + 1e-6) if len(rows) > 1 else members
            total[rows] += normalised
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    batch = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask}, {"uid": np.array(GROUPS)})
    batch.non_tensor_batch[REWARD_PARTS] = np.array(
        [{name: values[row] for name, values in parts.items()} for row in range(6)], dtype=object
    )
    found = compute_advantage(batch, "gdpo", config=AlgoConfig(gdpo_reward_keys=["right", "form"])).batch
    np.testing.assert_allclose(found["advantages"].numpy(), expected[:, None] * mask.numpy(), atol=1e-5)
    assert np.abs(expected).max() > 0.5
    with pytest.raises(
        ValueError, match="gdpo_reward_keys has 'rihgt'; the parts of the reward are form, other, right"
    ):
        compute_advantage(batch, "gdpo", config=AlgoConfig(gdpo_reward_keys=["rihgt"]))


def test_dr_grpo_only_centres() -> None:
    rewards, mask = _batch()
    advantages, _ = get_adv_estimator_fn("grpo")(rewards, mask, GROUPS, norm_adv_by_std_in_grpo=False)
    mean = sum(_groups_of(SCORES)["a"]) / 3
    assert torch.allclose(advantages[0], torch.full((4,), 1.0 - mean), atol=1e-6)


def test_rloo_compares_with_the_others() -> None:
    rewards, mask = _batch()
    advantages, _ = get_adv_estimator_fn("rloo")(rewards, mask, GROUPS)
    assert torch.allclose(advantages[0], torch.full((4,), 1.0 - (0.0 + 0.67) / 2))
    assert torch.allclose(advantages[5], 0.5 * mask[5])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_white_over_all_response_tokens(name: str) -> None:
    rewards, mask = _batch()
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=GROUPS, config=AlgoConfig()
    )
    chosen = advantages[mask.bool()]
    assert chosen.mean().abs() < 1e-6
    assert chosen.std() == pytest.approx(1.0, abs=1e-4)
    assert (advantages * (1 - mask)).abs().max() == 0


def test_reinforce_plus_plus_baseline_keeps_the_reward_of_a_group_of_one() -> None:
    rewards, mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]]), torch.ones(4, 1)
    advantages, _ = get_adv_estimator_fn("reinforce_plus_plus_baseline")(rewards, mask, index=["a", "b", "c", "d"])
    expected = (rewards - 0.5) / math.sqrt(1 / 3)
    assert torch.allclose(advantages, expected, atol=1e-5)


def test_one_token_is_whitened_to_zero() -> None:
    advantages, _ = get_adv_estimator_fn("reinforce_plus_plus")(torch.ones(1, 1), torch.ones(1, 1))
    assert advantages.item() == 0.0


def test_discounted_returns() -> None:
    rewards, mask = _batch()
    _, returns = get_adv_estimator_fn("reinforce_plus_plus")(rewards, mask, config=AlgoConfig(gamma=0.5))
    assert torch.allclose(returns[0], torch.tensor([0.125, 0.25, 0.5, 1.0]))


def test_unknown_and_doubly_registered_estimators_are_errors() -> None:
    with pytest.raises(ValueError, match="known: gae, gdpo, gpg, grpo"):
        get_adv_estimator_fn("absent")
    with pytest.raises(ValueError, match="registered already"):
        register_adv_est("grpo")(lambda **_: (torch.zeros(1), torch.zeros(1)))


def test_dual_clip_loss_of_every_case() -> None:
    ratio = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 5.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    config = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
    form = token_form(get_policy_loss_fn("vanilla"))
    assert form is not None
    found = form.losses(torch.zeros(6), ratio.log(), advantages, config, lambda x: x)
    assert torch.allclose(found.loss, torch.tensor([-1.0, -1.3, -0.5, 1.5, 0.8, 3.0]), atol=1e-6)
    assert found.is_clipped.tolist() == [False, True, False, False, True, False]
    assert found.is_clipped_lower.tolist() == [False] * 5 + [True]
    assert torch.allclose(found.approx_kl, -ratio.log())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_weights_of_parts_add_up_to_the_loss_of_the_whole(mode: str) -> None:
    _, mask = _batch()
    mask[3] = 0  # a response that is empty, e.g. a padded row
    loss = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    whole = agg_loss(loss, mask, mode)
    num_tokens, num_sequences = float(mask.sum()), float((mask.sum(-1) > 0).sum())
    parts = [
        (token_loss_weights(mask[rows], mode, num_tokens=num_tokens, num_sequences=num_sequences) * loss[rows]).sum()
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert torch.allclose(torch.stack(parts).sum(), whole, atol=1e-6)


def test_aggregation_modes_by_hand() -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    expected = {
        "token-mean": 10 / 4,
        "seq-mean-token-sum": (6 + 4) / 2,
        "seq-mean-token-mean": (2 + 4) / 2,
        "seq-mean-token-sum-norm": 10 / 3,
    }
    for mode, value in expected.items():
        assert agg_loss(loss, mask, mode).item() == pytest.approx(value)


def test_kl_estimates() -> None:
    ours, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    d = ours - reference
    assert torch.equal(kl_penalty(ours, reference, "kl"), d)
    assert torch.equal(kl_penalty(ours, reference, "abs"), d.abs())
    assert torch.allclose(kl_penalty(ours, reference, "mse"), d * d / 2)
    assert torch.allclose(kl_penalty(ours, reference, "low_var_kl"), torch.exp(-d) + d - 1)
    assert kl_penalty(ours, ours, "low_var_kl").abs().max() == 0
    assert kl_penalty(torch.tensor([-1000.0]), torch.tensor([0.0]), "low_var_kl").isfinite().all()
    with pytest.raises(ValueError, match="not known"):
        kl_penalty(ours, reference, "absent")


def test_adaptive_controller_raises_the_coefficient_when_kl_is_too_high() -> None:
    control = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=100))
    control.update(current_kl=1.0, n_steps=10)
    assert control.value == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    fixed = get_kl_controller(KLControlConfig(kl_coef=0.1))
    fixed.update(current_kl=1.0, n_steps=10)
    assert fixed.value == 0.1


def _random_batch(seed: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Rewards on any response token and mask [40, 6]; groups of any size, one of one row and one of equal scores."""
    random = np.random.default_rng(seed)
    groups = [f"g{i}" for i in random.integers(0, 9, size=36)] + ["alone"] + ["equal"] * 3
    mask = (np.arange(6) < random.integers(1, 7, size=(40, 1))).astype(float)
    rewards = random.normal(size=(40, 6)) * mask
    rewards[37:] = 0
    order = random.permutation(40)
    return rewards[order], mask[order], [groups[row] for row in order]


def _expected(name: str, rewards: np.ndarray, mask: np.ndarray, groups: list[str]) -> np.ndarray:
    """The papers' advantages, row by row."""
    scores, rows = rewards.sum(-1), range(len(rewards))
    members = [[scores[other] for other in rows if groups[other] == groups[row]] for row in rows]
    if name == "reinforce_plus_plus":
        values = np.array([[rewards[row, t:].sum() for t in range(rewards.shape[1])] for row in rows]) * mask
    else:
        baselines = []
        for row, group in zip(rows, members, strict=True):
            others = (sum(group) - scores[row]) / (len(group) - 1) if len(group) > 1 else 0.0
            mean = np.mean(group) if len(group) > 1 else 0.0
            baselines.append(others if name == "rloo" else mean)
        values = (scores - np.array(baselines))[:, None] * mask
        if name == "grpo":
            stds = [np.std(group, ddof=1) if len(group) > 1 else 1.0 for group in members]
            values = values / (np.array(stds)[:, None] + 1e-6)
    if name.startswith("reinforce"):
        tokens = values[mask > 0]
        values = (values - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) * mask
    return values


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_on_random_rewards_are_the_papers(name: str, seed: int) -> None:
    rewards, mask, groups = _random_batch(seed)
    config = AlgoConfig(norm_adv_by_std_in_grpo=name != "dr_grpo")
    found, _ = estimate_advantages(name.removeprefix("dr_"), torch.tensor(rewards), torch.tensor(mask), groups, config)
    np.testing.assert_allclose(found.numpy(), _expected(name, rewards, mask, groups), atol=1e-6)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_kl_estimates_have_the_gradient_of_finite_differences(kind: str) -> None:
    random = np.random.default_rng(0)
    ours, reference = random.normal(size=(5, 4)), random.normal(size=(5, 4))
    formulas = {
        "kl": lambda x: x - reference,
        "abs": lambda x: np.abs(x - reference),
        "mse": lambda x: (x - reference) ** 2 / 2,
        "low_var_kl": lambda x: np.exp(reference - x) - (reference - x) - 1,
    }
    formula = formulas[{"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.get(kind, kind)]
    variable = torch.tensor(ours, requires_grad=True)
    kl = kl_penalty(variable, torch.tensor(reference), kind)
    np.testing.assert_allclose(kl.detach().numpy(), formula(ours), atol=1e-6)
    kl.sum().backward()
    assert variable.grad is not None
    step = 1e-6
    np.testing.assert_allclose(
        variable.grad.numpy(), (formula(ours + step) - formula(ours - step)) / (2 * step), atol=1e-6
    )
