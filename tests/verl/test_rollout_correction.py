"""Rollout correction against formulas in NumPy, over one rank and over parts of the batch; what the config allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from verl.trainer.config import config_warnings, load_config, validate_config
from verl.trainer.config.algorithm import LEVELS, RolloutCorrectionSection
from verl.trainer.ppo.rollout_correction import (
    compute_offpolicy_metrics,
    corrections,
)

ROWS, WIDTH = 10, 7
KEY = "algorithm.rollout_correction"


def _arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Old and rollout log-probs and mask [B, R]; one row is empty, one has a token of almost no probability."""
    random = np.random.default_rng(5)
    rollout = -random.exponential(size=(ROWS, WIDTH))
    old = rollout + random.normal(scale=0.3, size=(ROWS, WIDTH))
    mask = (np.arange(WIDTH) < random.integers(1, WIDTH + 1, size=(ROWS, 1))).astype(float)
    mask[4], mask[6], old[6, 0] = 0, 1, rollout[6, 0] - 12
    return old, rollout, mask


def _ratios(level: str) -> np.ndarray:
    old, rollout, mask = _arrays()
    ratios = np.ones_like(old)
    for row in range(ROWS):
        tokens = np.flatnonzero(mask[row])
        logs = (old - rollout)[row, tokens]
        whole = {"sequence": np.exp(logs.sum()), "geometric": np.exp(logs.sum() / max(len(tokens), 1))}
        ratios[row, tokens] = np.exp(logs) if level == "token" else whole[level]
    return ratios


def _corrected(**knobs: Any) -> tuple[np.ndarray | None, np.ndarray, dict[str, float]]:
    old, rollout, mask = (torch.tensor(array) for array in _arrays())
    config = RolloutCorrectionSection(**knobs)
    assert config.problems("here") == []
    weights, kept, metrics = corrections(old, rollout, mask, config)
    return None if weights is None else weights.numpy(), kept.numpy(), metrics


@pytest.mark.parametrize("level", LEVELS)
def test_truncated_importance_sampling(level: str) -> None:
    _, _, mask = _arrays()
    ratios = _ratios(level)
    weights, kept, metrics = _corrected(rollout_is=level, rollout_is_threshold=1.2)
    assert weights is not None
    np.testing.assert_allclose(weights, np.minimum(ratios, 1.2) * mask, atol=1e-9)
    np.testing.assert_array_equal(kept, mask)
    counted = ratios[mask > 0] if level == "token" else ratios[mask.any(-1), 0]
    cut = np.minimum(counted, 1.2)
    expected = {
        "rollout_is_mean": cut.mean(),
        "rollout_is_std": cut.std(),
        "rollout_is_eff_sample_size": cut.sum() ** 2 / (len(cut) * (cut**2).sum()),
        "rollout_is_ratio_mean": counted.mean(),
        "rollout_is_ratio_fraction_high": (counted > 1.2).mean(),
    }
    assert expected["rollout_is_ratio_fraction_high"] > 0
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-9), name

    normalised, *_ = _corrected(rollout_is=level, rollout_is_threshold=1.2, rollout_is_batch_normalize=True)
    np.testing.assert_allclose(normalised, weights / cut.mean(), atol=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("upper", "lower"), [(1.2, None), (1.2, 0.0), (1.2, 0.7)])
def test_masked_importance_sampling(level: str, upper: float, lower: float | None) -> None:
    _, _, mask = _arrays()
    ratios = _ratios(level)
    weights, kept, metrics = _corrected(rollout_rs=level, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    assert weights is None
    low = 1 / upper if lower is None else lower
    expected = mask * (ratios >= low) * (ratios <= upper)
    np.testing.assert_array_equal(kept, expected)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - expected.sum() / mask.sum())
    hit = ((mask - expected).sum(-1) > 0).sum() / (mask.sum(-1) > 0).sum()
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(hit)
    assert hit > 0


def test_icepop_weighs_what_it_keeps_by_its_ratio() -> None:
    _, _, mask = _arrays()
    ratios = _ratios("token")
    weights, kept, _ = _corrected(
        rollout_is="token",
        rollout_is_threshold=1.25,
        rollout_rs="token",
        rollout_rs_threshold=1.25,
        rollout_rs_threshold_lower=0.8,
    )
    assert weights is not None
    expected = np.where((ratios >= 0.8) & (ratios <= 1.25), ratios, 0.0) * mask
    np.testing.assert_allclose(weights * kept, expected, atol=1e-9)


def test_one_impossible_token_vetoes_its_sequence() -> None:
    _, _, mask = _arrays()
    _, kept, metrics = _corrected(rollout_token_veto_threshold=1e-4)
    expected = mask.copy()
    expected[6] = 0
    np.testing.assert_array_equal(kept, expected)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / (mask.sum(-1) > 0).sum())
    assert metrics["rollout_corr/rollout_is_catastrophic_fraction"] == pytest.approx(1 / mask.sum())


def test_mismatch_metrics() -> None:
    old, rollout, mask = _arrays()
    metrics = compute_offpolicy_metrics(torch.tensor(old), torch.tensor(rollout), torch.tensor(mask))
    at = mask > 0
    logs = (old - rollout)[at]
    rows = [np.flatnonzero(mask[row]) for row in range(ROWS)]
    ppl_old = np.array([np.exp(-old[row, t].mean()) for row, t in enumerate(rows) if len(t)])
    ppl_rollout = np.array([np.exp(-rollout[row, t].mean()) for row, t in enumerate(rows) if len(t)])
    sums = np.array([(old - rollout)[row, t].sum() for row, t in enumerate(rows) if len(t)])
    expected = {
        "kl": -logs.mean(),
        "k3_kl": (np.exp(logs) - logs - 1).mean(),
        "chi2_token": (np.exp(logs) ** 2).mean() - 1,
        "training_ppl": ppl_old.mean(),
        "rollout_ppl": ppl_rollout.mean(),
        "log_ppl_diff": np.log(ppl_old / ppl_rollout).mean(),
        "log_ppl_abs_diff": np.abs(np.log(ppl_old / ppl_rollout)).mean(),
        "ppl_ratio": (ppl_old / ppl_rollout).mean(),
        "chi2_seq": (np.exp(sums) ** 2).mean() - 1,
    }
    assert metrics.keys() == {f"rollout_corr/{name}" for name in expected}
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=1e-6), name


def test_ranks_with_parts_of_the_batch_find_what_one_rank_finds() -> None:
    """Both parts run twice: once to learn the sums that a rank contributes, then with those of both."""
    knobs = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "geometric"}
    config = RolloutCorrectionSection(**knobs, rollout_token_veto_threshold=1e-4)  # type: ignore[arg-type]
    arrays = [torch.tensor(array) for array in _arrays()]
    parts = [[array[:3] for array in arrays], [array[3:] for array in arrays]]

    def corrected(tensors: list[torch.Tensor], over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
        return corrections(*tensors, config, over_ranks)  # type: ignore[arg-type]

    sums: list[list[torch.Tensor]] = [[], []]
    for part, found in zip(parts, sums, strict=True):
        corrected(part, lambda x, found=found: (found.append(x.clone()), x)[1])  # type: ignore[misc]
    totals = [first + second for first, second in zip(*sums, strict=True)]
    whole = corrected(arrays, lambda x: x)
    ours = []
    for part in parts:
        queue = iter(totals)
        ours.append(corrected(part, lambda x, queue=queue: next(queue)))  # type: ignore[misc]
    for place in (0, 1):
        assert torch.allclose(torch.cat([found[place] for found in ours]), whole[place], atol=1e-9)
    for found in ours:
        assert found[2] == pytest.approx(whole[2])


def test_equal_log_probs_are_not_corrected() -> None:
    _, rollout, mask = (torch.tensor(array) for array in _arrays())
    config = RolloutCorrectionSection("sequence", rollout_rs="geometric", rollout_rs_threshold=1.001)
    weights, kept, metrics = corrections(rollout, rollout, mask, config)
    assert weights is not None and torch.equal(weights, mask) and torch.equal(kept, mask)
    assert metrics["rollout_corr/kl"] == 0.0 and metrics["rollout_corr/ppl_ratio"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"{KEY}.rollout_is=word", "rollout_is is 'word'; expected one of token, sequence, geometric"),
        (f"{KEY}.rollout_is_threshold=0", "rollout_is_threshold is 0.0; it must be above 0"),
        (f"{KEY}={{rollout_rs:token,rollout_rs_threshold_lower:3}}", "rollout_rs_threshold_lower is 3"),
        (f"{KEY}.rollout_token_veto_threshold=2", "rollout_token_veto_threshold is 2.0; expected above 0 and below 1"),
        (f"{KEY}.rollout_is_batch_normalize=True", "rollout_is is empty: no weights"),
        (f"{KEY}={{rollout_is:token,bypass_mode:True}}", "every ratio is 1; take out rollout_is"),
    ],
)
def test_a_correction_that_cannot_work_is_told(override: str, told: str) -> None:
    assert told in "\n".join(validate_config(load_config([override])))


@pytest.mark.parametrize("override", ["rollout_is=token", "rollout_rs=geometric", "bypass_mode=True"])
def test_a_correction_needs_the_log_probs_of_the_rollout(override: str) -> None:
    keys = [f"{KEY}.{override}", "actor_rollout_ref.rollout.calculate_log_probs=False"]
    assert "set actor_rollout_ref.rollout.calculate_log_probs=True" in "\n".join(validate_config(load_config(keys)))
    assert not any("calculate_log_probs" in problem for problem in validate_config(load_config(keys[:1])))


def test_a_correction_needs_old_log_probs_unless_it_goes_without() -> None:
    one_update = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    several = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    assert not load_config(one_update).needs_old_log_prob
    assert load_config([*one_update, f"{KEY}.rollout_is=token"]).needs_old_log_prob
    assert load_config(several).needs_old_log_prob
    assert not load_config([*several, f"{KEY}.bypass_mode=True"]).needs_old_log_prob
    told = config_warnings(
        load_config([*one_update, f"{KEY}.rollout_is=token", "actor_rollout_ref.actor.recompute_old_log_prob=False"])
    )
    assert any("algorithm.rollout_correction compares with them" in warning for warning in told)
