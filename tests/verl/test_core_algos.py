"""Upstream's names of the algorithms: estimators, losses and KL forms against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verl.advantages import estimate_advantages
from verl.trainer.config import AlgoConfig, load_config, validate_config
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.algos import ESTIMATORS, AdvantageEstimator
from verl.trainer.ppo.policy_losses import LOSSES
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

# Two prompts with three and two responses of 2, 1, 3 and 3, 1 tokens.
GROUPS = np.array(["a", "a", "a", "b", "b"], dtype=object)
LENGTHS = [2, 1, 3, 3, 1]
SCORES = [1.0, 0.0, 0.5, 0.0, 0.2]


def _rewards() -> tuple[Tensor, Tensor]:
    mask = (torch.arange(3)[None] < torch.tensor(LENGTHS)[:, None]).float()
    rewards = torch.zeros(5, 3)
    rewards[torch.arange(5), torch.tensor(LENGTHS) - 1] = torch.tensor(SCORES)
    return rewards, mask


def _by_row(name: str, config: AlgoConfig | None = None) -> list[float]:
    """The advantage of each row, after a check that it is on all of its tokens and nowhere else."""
    rewards, mask = _rewards()
    advantages, _ = estimate_advantages(name, rewards, mask, GROUPS, config or AlgoConfig())
    assert torch.equal(advantages, advantages[:, :1] * mask)
    return advantages[:, 0].tolist()


def test_every_estimator_of_the_enumeration_is_registered_under_both_forms_of_its_name() -> None:
    assert {member.value for member in AdvantageEstimator} <= set(ESTIMATORS.names)
    for member in AdvantageEstimator:
        assert core_algos.get_adv_estimator_fn(member) is core_algos.get_adv_estimator_fn(member.value)
    assert core_algos.get_adv_estimator_fn("gae") is core_algos.compute_gae_advantage_return


def test_grpo_by_turns_credits_a_turn_with_what_came_from_it_on() -> None:
    """Two samples of one prompt: turns with the rewards 1, 0 and 0.5; 0.25. They are normalised together."""
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0]]).float()
    rewards = torch.zeros(2, 8)
    rewards[0, 1], rewards[0, 6], rewards[1, 2] = 1.0, 0.5, 0.25
    given = torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
    first, second, third, other = ((given - given.mean()) / (given.std() + 1e-6)).tolist()
    expected = [[first + second + third] * 2, [second + third], [third]]
    advantages, _ = estimate_advantages("grpo_turns", rewards, mask, np.array(["a", "a"]), AlgoConfig())
    assert advantages[0].tolist() == pytest.approx([*expected[0], 0, *expected[1], 0, 0, *expected[2], 0], abs=1e-6)
    assert advantages[1].tolist() == pytest.approx([other] * 3 + [0] * 5, abs=1e-6)
    assert _by_row("grpo_turns") == pytest.approx(_by_row("grpo"))
    without = AlgoConfig(norm_adv_by_std_in_grpo=False)
    assert _by_row("grpo_turns", without) == pytest.approx(_by_row("grpo", without))


def test_opo_weighs_the_baseline_by_length() -> None:
    of_a, of_b = (2 * 1.0 + 1 * 0.0 + 3 * 0.5) / 6, (3 * 0.0 + 1 * 0.2) / 4
    assert _by_row("opo") == pytest.approx([1 - of_a, -of_a, 0.5 - of_a, -of_b, 0.2 - of_b], abs=1e-6)


def test_gpg_makes_up_for_rewards_of_zero() -> None:
    scale = 5 / 3  # three of the five rewards are not 0
    assert _by_row("gpg") == pytest.approx([scale * x for x in (0.5, -0.5, 0.0, -0.1, 0.1)], abs=1e-6)
    rewards, mask = _rewards()
    halved, _ = core_algos.compute_gpg_outcome_advantage(rewards, mask, GROUPS, f_norm=2.0)
    assert halved[0, 0].item() == pytest.approx(scale * 0.25)


def test_pass_at_k_rewards_the_best_by_its_lead() -> None:
    std_a, std_b = 0.5, math.sqrt(0.02)
    expected = [0.5 / (std_a + 1e-6), 0.0, 0.0, 0.0, 0.2 / (std_b + 1e-6)]
    assert _by_row("grpo_passk") == pytest.approx(expected, rel=1e-5)
    assert _by_row("grpo_passk", AlgoConfig(norm_adv_by_std_in_grpo=False)) == pytest.approx([0.5, 0, 0, 0, 0.2])
    with pytest.raises(ValueError, match="set actor_rollout_ref.rollout.n to 2"):
        core_algos.compute_grpo_passk_outcome_advantage(*_rewards(), np.array(["a", "b", "b", "b", "b"]))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_vectorized_names_are_the_same(name: str) -> None:
    assert _by_row(f"{name}_vectorized") == _by_row(name)
    assert _by_row("grpo_vectorized", AlgoConfig(norm_adv_by_std_in_grpo=False)) == pytest.approx(
        [0.5, -0.5, 0.0, -0.1, 0.1]
    )


def test_group_keys_may_be_integers_in_a_tensor() -> None:
    rewards, mask = _rewards()
    by_key = core_algos.compute_rloo_outcome_advantage(rewards, mask, torch.tensor([7, 7, 7, 3, 3]))[0]
    assert torch.equal(by_key, core_algos.compute_rloo_outcome_advantage(rewards, mask, GROUPS)[0])


def test_remax_subtracts_the_greedy_reward_from_the_rewards_to_come() -> None:
    rewards = torch.tensor([[0.1, 0.0, 1.0, 5.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    advantages, returns = core_algos.compute_remax_outcome_advantage(rewards, torch.tensor([0.4]), mask)
    assert torch.allclose(returns, torch.tensor([[1.1, 1.0, 1.0, 0.0]]))
    assert torch.allclose(advantages, torch.tensor([[0.7, 0.6, 0.6, 0.0]]))


def test_gae_by_hand_and_over_a_gap_between_two_turns() -> None:
    gamma, lam = 0.9, 0.8
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.3]])
    last = 1.0 - 0.3
    middle = 0.9 * 0.3 - 0.4 + 0.72 * last
    first = 0.9 * 0.4 - 0.5 + 0.72 * middle
    plain = torch.tensor([[first, middle, last]])
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, torch.ones(1, 3), gamma, lam)
    assert torch.allclose(returns, plain + values)
    assert torch.allclose(advantages, (plain - plain.mean()) / plain.std(), atol=1e-5)

    # A tool's tokens, whose values mean nothing, stand between the first and the second response token.
    mask = torch.tensor([[1.0, 0.0, 0.0, 1.0, 1.0]])
    gaps = torch.tensor([[0.5, 9.0, -7.0, 0.4, 0.3]])
    wide, wide_returns = core_algos.compute_gae_advantage_return(
        torch.tensor([[0.0, 3.0, 3.0, 0.0, 1.0]]), gaps, mask, gamma, lam
    )
    assert torch.allclose(wide[mask > 0], advantages[0]) and wide[mask == 0].abs().max() == 0
    assert torch.allclose(wide_returns[mask > 0], returns[0])


@pytest.mark.parametrize("kind", ["kl", "k1", "abs", "low_var_kl", "k3", "mse", "k2"])
def test_straight_through_kl_has_its_own_value_and_the_gradient_of_k2(kind: str) -> None:
    ours, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-1.5, -1.0])
    found = core_algos.kl_penalty(ours, reference, f"{kind}+")
    assert torch.allclose(found, core_algos.kl_penalty_forward(ours, reference, kind))
    found.sum().backward()
    assert ours.grad is not None and ours.grad.tolist() == pytest.approx([0.5, -1.0])


def _tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old and new log-probs, advantages, mask [2, 3]; ratios 1, 1.5, 1 | 0.5, 1, (masked)."""
    old = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, -9.0]])
    new = old + torch.tensor([[1.0, 1.5, 1.0], [0.5, 1.0, 7.0]]).log()
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3])
    return old, new, advantages, torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def test_policy_losses_in_upstreams_form_by_hand() -> None:
    old, new, advantages, mask = _tokens()
    config = ActorConfig(clip_ratio=0.2)

    def loss_of(name: str, mode: str = "token-mean", weights: Tensor | None = None) -> float:
        loss, metrics = core_algos.get_policy_loss_fn(name)(
            old, new, advantages, mask, mode, config=config, rollout_is_weights=weights
        )
        assert all(isinstance(value, float) for value in metrics.values())
        return loss.item()

    assert loss_of("vanilla") == pytest.approx((-2.0 - 2.4 - 2.0 + 0.8 + 1.0) / 5)
    assert loss_of("vanilla", weights=torch.full((2, 3), 0.5)) == pytest.approx((-2.0 - 2.4 - 2.0 + 0.8 + 1.0) / 10)
    assert loss_of("gpg") == pytest.approx(float((-advantages * new * mask).sum()) / 5)
    first = 1.2 ** (1 / 3)  # the log-ratio of 1.5 is cut at log 1.2 = 0.18, below the bound of 0.2
    config = ActorConfig(clip_ratio=math.log(1.2))
    second = (1 / 1.2) ** (1 / 2)  # ratios of 0.5 are cut at 1 / 1.2 where the advantage is negative
    assert loss_of("geo_mean") == loss_of("geo_mean", "token-mean") == pytest.approx((-2 * first + second) / 2)
    config = ActorConfig(clip_ratio=0.2)
    ratios = 1.5 ** (1 / 3), 0.5 ** (1 / 2)
    assert loss_of("gspo", "seq-mean-token-mean") == pytest.approx((-2 * min(ratios[0], 1.2) + max(ratios[1], 0.8)) / 2)


def test_clip_cov_drops_tokens_of_high_covariance() -> None:
    old, new, advantages, mask = _tokens()
    mean = (-1 - 2 + math.log(1.5) - 3 - 1 + math.log(0.5) - 2) / 5
    highest = (2.0 - 0.8) * (-1.0 - mean)  # of the first token, which PPO does not clip
    settings = PolicyLossConfig("clip_cov", clip_cov_ratio=0.2, clip_cov_lb=highest - 0.01, clip_cov_ub=highest + 0.01)
    new.requires_grad_()
    loss, metrics = core_algos.compute_policy_loss_clip_cov(
        old, new, advantages, mask, config=ActorConfig(clip_ratio=0.2, policy_loss=settings)
    )
    assert loss.item() == pytest.approx((-2.4 - 2.0 + 0.8 + 1.0) / 5) and metrics["actor/pg_clipfrac"] == 0.2
    loss.backward()
    assert new.grad is not None and new.grad[0, 0] == 0 and new.grad[0, 2] != 0


def test_kl_cov_penalises_the_token_of_highest_covariance() -> None:
    old, new, advantages, mask = _tokens()
    new[0, 0] -= 0.2
    mean = (-1.2 - 2 + math.log(1.5) - 3 - 1 + math.log(0.5) - 2) / 5
    covariances = [1.2 * (-1.2 - mean), 1.2 * (-2 + math.log(1.5) - mean), -1.8 * (-2 - mean)]
    assert max(covariances) == covariances[0] > 0
    settings = PolicyLossConfig("kl_cov", ppo_kl_coef=10.0)  # the ratio of 0.0002 gives the least, one token
    loss, _ = core_algos.compute_policy_loss_kl_cov(
        old, new, advantages, mask, config=ActorConfig(policy_loss=settings)
    )
    assert loss.item() == pytest.approx((-2.0 * math.exp(-0.2) + 10.0 * 0.2 - 3.0 - 2.0 + 0.5 + 1.0) / 5, abs=1e-6)


@pytest.mark.parametrize("name", ["gae", "remax"])
def test_estimators_that_a_run_has_no_inputs_for_are_refused(name: str) -> None:
    problems = validate_config(load_config([f"algorithm.adv_estimator={name}"]))
    assert any(problem.startswith(f"algorithm.adv_estimator is '{name}', which needs") for problem in problems)


@pytest.mark.parametrize("name", sorted({"gpg", "clip_cov", "kl_cov", "geo_mean"}))
def test_the_losses_are_names_of_the_config(name: str) -> None:
    assert name in LOSSES.names
    problems = validate_config(load_config([f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"]))
    assert not [problem for problem in problems if "policy_loss" in problem]
