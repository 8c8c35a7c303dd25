"""Rollout correction against formulas in NumPy, over one rank and over parts of the batch; what the config allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.megatron.model_helpers import one_process_groups
from verl.protocol import DataProto
from verl.trainer.config import config_warnings, load_config, validate_config
from verl.trainer.config.algorithm import LEVELS, REJECTIONS, RolloutCorrectionSection
from verl.trainer.ppo.rollout_correction import LossCorrection, compute_offpolicy_metrics, corrections
from verl.utils.megatron.packed_batch import pack_micro_batch
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_loss import PolicyLoss
from verl.workers.actor.update_metrics import UpdateMetrics
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

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


@pytest.mark.parametrize("level", LEVELS)
def test_weights_outside_two_bounds_are_0_and_their_tokens_stay(level: str) -> None:
    _, _, mask = _arrays()
    ratios = _ratios(level)
    weights, kept, metrics = _corrected(rollout_is=level, rollout_is_threshold="0.8_1.25")
    assert weights is not None
    expected = np.where((ratios < 0.8) | (ratios > 1.25), 0.0, ratios) * mask
    np.testing.assert_allclose(weights, expected, atol=1e-9)
    np.testing.assert_array_equal(kept, mask)
    counted = (ratios if level == "token" else ratios[:, :1])[mask[:, : None if level == "token" else 1] > 0]
    inside = counted * (counted >= 0.8) * (counted <= 1.25)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(inside.mean())
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx((counted > 1.25).mean())
    assert 0 < (inside == 0).mean() < 1


def _statistic(name: str, logs: np.ndarray) -> np.ndarray:
    """Of each token of a row of log-ratios, in float64 and from the ratios themselves."""
    scope, _, estimator = name.rpartition("_")
    ratios = np.exp(logs)
    if estimator == "k1":
        whole = {"seq_sum": np.prod(ratios), "seq_mean": np.prod(ratios) ** (1 / len(ratios))}
        return ratios if scope == "token" else np.full_like(ratios, whole[scope])
    each = [np.log(r) ** 2 / 2 if estimator == "k2" else r - 1 - np.log(r) for r in ratios]
    whole = {"seq_sum": sum(each), "seq_mean": sum(each) / len(each), "seq_max": max(each)}
    return np.array(each) if scope == "token" else np.full_like(ratios, whole[scope])


def _kept(names: list[str], bounds: list[tuple[float, float]]) -> np.ndarray:
    old, rollout, mask = _arrays()
    for row in range(ROWS):
        tokens = np.flatnonzero(mask[row])
        for name, (lower, upper) in zip(names, bounds, strict=True):
            if len(tokens):
                value = _statistic(name, (old - rollout)[row, tokens])
                mask[row, tokens] *= (value >= lower) & (value <= upper)
    return mask


@pytest.mark.parametrize("name", REJECTIONS)
def test_every_statistic_rejects_what_is_out_of_its_bounds(name: str) -> None:
    upper = 1.2 if name.endswith("k1") else 0.05
    expected = _kept([name], [(1 / 1.2 if name.endswith("k1") else -1.0, upper)])
    _, kept, metrics = _corrected(rollout_rs=name, rollout_rs_threshold=str(upper))
    np.testing.assert_array_equal(kept, expected)
    _, _, mask = _arrays()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - expected.sum() / mask.sum())
    assert 0 < expected.sum() < mask.sum()


def test_a_list_of_statistics_rejects_what_any_of_them_does() -> None:
    _, kept, _ = _corrected(rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="0.6_1.6,2.5")
    np.testing.assert_array_equal(kept, _kept(["token_k1", "seq_max_k2"], [(0.6, 1.6), (-1.0, 2.5)]))
    assert kept[5].sum() > 0 and kept[6].sum() == 0
    section = RolloutCorrectionSection(rollout_rs="token,seq_mean_k3", rollout_rs_threshold=0.5)  # type: ignore[arg-type]
    assert section.rejections == [("token_k1", 2.0, 0.5), ("seq_mean_k3", -math.inf, 0.5)]
    assert any("rollout_rs_threshold_lower" in problem for problem in section.problems("here"))


@pytest.mark.parametrize("level", LEVELS)
def test_the_names_of_two_versions_mean_the_same(level: str) -> None:
    new = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}[level]
    for bounds in ("1.3", "0.7_1.2"):
        ours = [_corrected(rollout_rs=name, rollout_rs_threshold=bounds)[1] for name in (level, new)]
        np.testing.assert_array_equal(*ours)


@pytest.mark.parametrize("normalises", [False, True])
def test_reinforce_weighs_the_policy_gradient_by_the_policy_that_is_updated(normalises: bool) -> None:
    """L = -mean of w A log-prob over all response tokens, w constant: min(r, C), 0 for what is rejected or vetoed."""
    new, rollout, mask = _arrays()
    advantages = np.random.default_rng(0).normal(size=(ROWS, 1)) * mask
    section = RolloutCorrectionSection(
        "sequence", "1.2", "token_k1,seq_max_k2", "0.6_1.6,2.5", None, 1e-4, True, "reinforce", normalises
    )
    assert section.problems("here") == [] and section.in_loss == section
    mean = 0.8 if normalises else 1.0
    correction = LossCorrection.of(section, {"rollout_corr/rollout_is_mean": 0.8})
    tensors = {
        "response_mask": torch.tensor(mask),
        "attention_mask": torch.tensor(np.concatenate([np.ones((ROWS, 1)), mask], 1)),
        "input_ids": torch.ones(ROWS, 1 + WIDTH, dtype=torch.long),
        "advantages": torch.tensor(advantages),
        "rollout_log_probs": torch.tensor(rollout),
    }
    log_probs, cpu = torch.tensor(new, requires_grad=True), torch.device("cpu")
    config = ActorConfig(policy_loss=PolicyLossConfig("gpg"))
    with one_process_groups() as groups:
        given = DataProto.from_dict(tensors), config, groups, cpu
        loss_of = PolicyLoss(config, LossInputs.from_batch(*given, anchors_on_rollout=True, correction=correction))
        metrics = UpdateMetrics(groups, cpu)
        reports = []
        for rows in ([6, 1, 2], [0, 3, 4, 5, 7], [8], [9]):
            micro = pack_micro_batch(*(tensors[k] for k in ("input_ids", "attention_mask", "response_mask")), rows, 1)
            at = micro.rows_S, micro.cols_S
            loss, report = loss_of(log_probs[at].float(), log_probs.detach()[at], micro)
            loss.backward()
            reports.append(report)
        metrics.add(reports, 0.0, 0.0, True)
        found = metrics.result()
    weights = np.minimum(_ratios("sequence"), 1.2) * mask
    factors = weights / mean * _kept(["token_k1", "seq_max_k2"], [(0.6, 1.6), (-1.0, 2.5)])
    assert log_probs.grad is not None and 0 < (factors > 0).sum() < mask.sum()
    np.testing.assert_allclose(log_probs.grad.numpy(), -factors * advantages / mask.sum(), atol=1e-6)
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx(weights.sum() / mask.sum(), abs=1e-6)
    left_out = 1 - (factors > 0).sum() / mask.sum()
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(left_out, abs=1e-6)


def test_the_ratio_of_ppo_needs_no_weights_in_bypass_mode() -> None:
    section = RolloutCorrectionSection("token", rollout_rs="token_k1", bypass_mode=True)
    assert section.in_loss is not None and section.in_loss.rollout_is is None and not section.is_on
    assert RolloutCorrectionSection("token", bypass_mode=True).in_loss is None
    assert RolloutCorrectionSection("token", rollout_rs="token_k1").in_loss is None


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
        (f"{KEY}.rollout_is_threshold=0", "rollout_is_threshold is '0'; expected a number above 0, or two bounds"),
        (f"{KEY}.rollout_is_threshold='1.0,2.0'", "rollout_is_threshold is '1.0,2.0'; expected a number above 0"),
        (f"{KEY}.rollout_is_threshold=4.0_0.5", "rollout_is_threshold is '4.0_0.5'; expected a number above 0"),
        (f"{KEY}.rollout_rs='token_k1,seq_max_k1'", "rollout_rs is 'token_k1,seq_max_k1'; expected one of token, seq"),
        (f"{KEY}={{rollout_rs:token,rollout_rs_threshold:high}}", "rollout_rs_threshold is 'high'; expected numbers"),
        (f"{KEY}={{rollout_rs:'token,token_k2',rollout_rs_threshold:'1,2,3'}}", "give rollout_rs_threshold a bound"),
        (f"{KEY}={{rollout_rs:seq_max_k2}}", "rollout_rs is seq_max_k2; give rollout_rs_threshold a bound for each"),
        (f"{KEY}={{rollout_rs:token,rollout_rs_threshold:'0.5_2.0',rollout_rs_threshold_lower:0.1}}", "bound once"),
        (f"{KEY}.loss_type=clip", "loss_type is 'clip'; expected one of ppo_clip, reinforce"),
        (f"{KEY}={{rollout_rs:token,rollout_rs_threshold_lower:3}}", "rollout_rs_threshold_lower is 3"),
        (f"{KEY}.rollout_token_veto_threshold=2", "rollout_token_veto_threshold is 2.0; expected above 0 and below 1"),
        (f"{KEY}.rollout_is_batch_normalize=True", "rollout_is is empty: no weights"),
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
    reinforce = f"{KEY}={{bypass_mode:True,loss_type:reinforce,rollout_is:sequence,rollout_rs:token_k1}}"
    assert not load_config([*several, reinforce]).needs_old_log_prob
    assert load_config([*several, reinforce, f"{KEY}.rollout_is_batch_normalize=True"]).needs_old_log_prob
    told = config_warnings(
        load_config([*one_update, f"{KEY}.rollout_is=token", "actor_rollout_ref.actor.recompute_old_log_prob=False"])
    )
    assert any("algorithm.rollout_correction compares with them" in warning for warning in told)
