"""Policy losses against their papers' formulas in NumPy, and their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss
from verl.trainer.ppo.policy_losses.registry import TokenLossFn, token_form
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

LOSS_MODES = ("cispo", "dppo_tv", "geo_mean", "gpg", "gspo", "sapo", "vanilla")
ROWS, WIDTH = 12, 9
LOW, HIGH, BOUND = 0.2, 0.28, 3.0
# Of arrays [B, R]: old log-probs, log-probs, advantages, mask -> loss of each token whose mean over the tokens of a
# sequence is the paper's loss of that sequence.
Formula = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def token_losses(mode: str) -> TokenLossFn:
    form = token_form(get_policy_loss_fn(mode))
    assert form is not None
    return form.losses


def ppo(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    loss = np.empty_like(new)
    for at in np.ndindex(new.shape):
        ratio, advantage = np.exp(new[at] - old[at]), advantages[at]
        objective = min(ratio * advantage, min(max(ratio, 1 - LOW), 1 + HIGH) * advantage)
        loss[at] = -(max(objective, BOUND * advantage) if advantage < 0 else objective)
    return loss * mask


def gspo(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The paper's loss of a sequence (equation 5), on each of its tokens."""
    loss = np.zeros_like(new)
    for row in range(len(new)):
        tokens = np.flatnonzero(mask[row])
        if len(tokens):
            ratio = (np.exp(new[row, tokens].sum()) / np.exp(old[row, tokens].sum())) ** (1 / len(tokens))
            advantage = advantages[row, tokens[0]]
            loss[row, tokens] = -min(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    return loss


def geo_mean(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """GMPO's loss of a sequence, the geometric mean of its clipped ratios, on each of its tokens."""
    loss = np.zeros_like(new)
    for row in range(len(new)):
        tokens = np.flatnonzero(mask[row])
        if len(tokens):
            ratios = np.exp(new[row, tokens] - old[row, tokens])
            advantage = advantages[row, tokens[0]]
            ratios = np.minimum(ratios, np.exp(HIGH)) if advantage > 0 else np.maximum(ratios, np.exp(-LOW))
            loss[row, tokens] = -advantage * np.prod(ratios) ** (1 / len(tokens))
    return loss


def gpg(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return -advantages * new * mask


def sapo(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    loss = np.empty_like(new)
    for at in np.ndindex(new.shape):
        ratio, advantage = np.exp(new[at] - old[at]), advantages[at]
        tau = 1.0 if advantage > 0 else 1.05
        loss[at] = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    return loss * mask


def dppo_tv_at(masks_from: np.ndarray) -> Formula:
    """The mask is a constant: that of the log-probs ``masks_from``."""

    def dppo_tv(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
        p, q = np.exp(masks_from), np.exp(old)
        far = np.abs(p - q) > np.where(p > q, HIGH, LOW)  # the total variation of (p, 1 - p) and (q, 1 - q)
        away = (advantages > 0) & (p / q > 1) | (advantages < 0) & (p / q < 1)
        return -np.exp(new - old) * advantages * mask * ~(far & away)

    return dppo_tv


def cispo_at(weights_from: np.ndarray) -> Formula:
    """The weights are constants: those of the log-probs ``weights_from``."""

    def cispo(old: np.ndarray, new: np.ndarray, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return -np.minimum(np.maximum(np.exp(weights_from - old), 1 - LOW), 1 + HIGH) * advantages * new * mask

    return cispo


def _formula(mode: str, new: np.ndarray) -> Formula:
    formulas: dict[str, Formula] = {
        "vanilla": ppo,
        "gspo": gspo,
        "cispo": cispo_at(new),
        "sapo": sapo,
        "dppo_tv": dppo_tv_at(new),
        "geo_mean": geo_mean,
        "gpg": gpg,
    }
    return formulas[mode]


def _arrays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Old and new log-probs, advantages of the row, mask [B, R]; ratios on both sides of every bound, one row empty."""
    random = np.random.default_rng(seed)
    old = -2.0 + random.normal(size=(ROWS, WIDTH))
    new = old + random.normal(size=(ROWS, 1)) * 0.3 + random.normal(size=(ROWS, WIDTH)) * random.choice([0.1, 1.5])
    mask = (np.arange(WIDTH) < random.integers(1, WIDTH + 1, size=(ROWS, 1))).astype(float)
    mask[3] = 0
    return old, new, random.normal(size=(ROWS, 1)) * mask, mask


def _loss(
    mode: str, old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    def sequence_mean(values: torch.Tensor) -> torch.Tensor:
        means = (values.detach() * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        return means.expand_as(values)

    config = ActorConfig(
        clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=BOUND, policy_loss=PolicyLossConfig(mode)
    )
    return token_losses(mode)(old, new, advantages, config, sequence_mean).loss * mask


def _sequence_means(loss: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return loss.sum(-1) / np.maximum(mask.sum(-1), 1)


@pytest.mark.parametrize("mode", LOSS_MODES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_is_the_papers_formula_and_its_gradient_that_of_finite_differences(mode: str, seed: int) -> None:
    old, new, advantages, mask = _arrays(seed)
    formula = _formula(mode, new)
    variable = torch.tensor(new, requires_grad=True)
    loss = _loss(mode, torch.tensor(old), variable, torch.tensor(advantages), torch.tensor(mask))
    np.testing.assert_allclose(loss.detach().numpy(), formula(old, new, advantages, mask), atol=1e-6)

    def total(log_probs: np.ndarray) -> float:
        return float(_sequence_means(formula(old, log_probs, advantages, mask), mask).sum())

    (loss.sum(-1) / variable.new_tensor(mask).sum(-1).clamp(min=1)).sum().backward()
    assert variable.grad is not None
    step, expected = 1e-6, np.empty_like(new)
    for at in np.ndindex(new.shape):
        up, down = new.copy(), new.copy()
        up[at], down[at] = up[at] + step, down[at] - step
        expected[at] = (total(up) - total(down)) / (2 * step)
    np.testing.assert_allclose(variable.grad.numpy(), expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-2


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_on_policy_every_loss_has_the_policy_gradient(mode: str) -> None:
    _, new, advantages, mask = _arrays(0)
    variable = torch.tensor(new, requires_grad=True)
    _loss(mode, torch.tensor(new), variable, torch.tensor(advantages), torch.tensor(mask)).sum().backward()
    assert variable.grad is not None
    np.testing.assert_allclose(variable.grad.numpy(), -advantages * mask, atol=1e-12)


def test_what_is_clipped() -> None:
    old, ratio = torch.zeros(4), torch.tensor([1.0, 1.5, 0.5, 5.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    config = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3)
    found = {mode: token_losses(mode)(old, ratio.log(), advantages, config, lambda x: x) for mode in LOSS_MODES}
    assert found["vanilla"].is_clipped.tolist() == [False, True, True, False]
    assert found["vanilla"].is_clipped_lower.tolist() == [False, False, False, True]
    assert found["gspo"].is_clipped.tolist() == [False, True, True, False]
    assert found["cispo"].is_clipped.tolist() == [False, True, True, True]
    assert not found["sapo"].is_clipped.any() and found["dppo_tv"].is_clipped.tolist() == [False, True, True, False]
    assert not found["gspo"].is_clipped_lower.any() and not found["cispo"].is_clipped_lower.any()
    for losses in found.values():
        assert torch.allclose(losses.approx_kl, -ratio.log())


def test_cispo_without_a_lower_bound_keeps_small_weights() -> None:
    config = ActorConfig(clip_ratio_low=1.0, clip_ratio_high=0.3)
    log_prob = torch.tensor([-3.0, -1.0], requires_grad=True)
    losses = token_losses("cispo")(torch.tensor([-1.0, -3.0]), log_prob, torch.ones(2), config, lambda x: x)
    losses.loss.sum().backward()
    assert log_prob.grad is not None
    assert torch.allclose(log_prob.grad, -torch.tensor([np.exp(-2.0), 1.3], dtype=torch.float32))


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_huge_ratios_stay_finite(mode: str) -> None:
    new = torch.tensor([0.0, -1000.0], requires_grad=True)
    config = ActorConfig(policy_loss=PolicyLossConfig(mode))
    losses = token_losses(mode)(torch.tensor([-1000.0, 0.0]), new, torch.tensor([-1.0, 1.0]), config, lambda x: x)
    losses.loss.sum().backward()
    assert losses.loss.isfinite().all() and new.grad is not None and new.grad.isfinite().all()


def test_unknown_and_doubly_registered_losses_are_errors() -> None:
    with pytest.raises(
        ValueError, match="'absent'; known: cispo, clip_cov, dppo_tv, geo_mean, gpg, gspo, kl_cov, sapo"
    ):
        get_policy_loss_fn("absent")
    with pytest.raises(ValueError, match="registered already"):
        register_policy_loss("gspo")(get_policy_loss_fn("vanilla"))
