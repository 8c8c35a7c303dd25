"""What stands at a masked place, NaN and infinity too, changes no loss, gradient, advantage or metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.algos import get_adv_estimator_fn
from verl.trainer.ppo.algos.groups import whitened
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.rollout_corr_helper import compute_policy_loss_with_rollout_correction
from verl.trainer.ppo.rollout_correction import corrections
from verl.trainer.ppo.step_functions import apply_kl_penalty
from verl.utils.torch_functional import masked_mean, masked_sum, masked_var, masked_whiten

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0.0]])
UIDS = [0, 0, 1, 1]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ODD = (math.nan, math.inf, -math.inf)


def _rows(seed: int, odd: float) -> Tensor:
    """The same values at the response's places for every ``odd``."""
    values = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(MASK > 0, values, torch.tensor(odd))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for name in sorted(value) for tensor in _flat(value[name])]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _flat(one)]
    return [] if value is None else [torch.as_tensor(value).detach().double()]


def _is_independent(compute: Callable[[float], Any]) -> None:
    expected = _flat(compute(0.5))
    assert expected and all(tensor.isfinite().all() for tensor in expected)
    for odd in ODD:
        for found, wanted in zip(_flat(compute(odd)), expected, strict=True):
            assert torch.equal(found, wanted), odd


def _with_gradient(loss_of: Callable[[Tensor], Any], odd: float) -> Any:
    log_prob = _rows(1, odd).requires_grad_()
    found = loss_of(log_prob)
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    assert log_prob.grad is not None
    return found, log_prob.grad


@pytest.mark.parametrize("mode", MODES)
def test_every_aggregation(mode: str) -> None:
    for mask in (MASK, MASK.bool(), MASK.long()):
        _is_independent(lambda odd, mask=mask: _with_gradient(lambda x: core_algos.agg_loss(x, mask, mode), odd))


@pytest.mark.parametrize("name", sorted(core_algos.POLICY_LOSS_REGISTRY))
def test_every_policy_loss(name: str) -> None:
    policy_loss = core_algos.get_policy_loss_fn(name)
    config = {"clip_ratio": 0.2, "policy_loss": {"clip_cov_ratio": 0.2, "kl_cov_ratio": 0.2, "clip_cov_lb": -9.0}}

    def loss_of(odd: float, weights: Tensor | None) -> Any:
        advantages, old = _rows(2, odd), _rows(3, odd)
        return _with_gradient(
            lambda x: policy_loss(old, x, advantages, MASK, "token-mean", config, rollout_is_weights=weights), odd
        )

    _is_independent(lambda odd: loss_of(odd, None))
    _is_independent(lambda odd: loss_of(odd, _rows(4, odd).abs()))


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_kl_in_the_loss_and_in_the_reward(kind: str) -> None:
    def reward(odd: float) -> Any:
        columns = {"response_mask": MASK, "old_log_probs": _rows(1, odd), "ref_log_prob": _rows(2, odd)}
        data = DataProto.from_dict(columns | {"token_level_scores": torch.ones_like(MASK)})
        data, metrics = apply_kl_penalty(data, core_algos.FixedKLController(0.1), kind)
        return data.batch["token_level_rewards"], metrics

    _is_independent(reward)


def test_value_and_entropy_losses() -> None:
    _is_independent(
        lambda odd: _with_gradient(
            lambda x: core_algos.compute_value_loss(x, _rows(2, odd), _rows(3, odd), MASK, 0.2), odd
        )
    )

    def entropy(odd: float) -> Any:
        logits = torch.stack([_rows(seed, odd) for seed in range(6)], dim=-1).requires_grad_()
        loss = core_algos.compute_entropy_loss(logits, MASK)
        loss.backward()
        return loss, logits.grad

    _is_independent(entropy)


@pytest.mark.parametrize("name", sorted(map(str, core_algos.ADV_ESTIMATOR_REGISTRY)))
def test_every_advantage(name: str) -> None:
    estimate = get_adv_estimator_fn(name)

    def advantages(odd: float) -> Any:
        given: dict[str, Any] = {"token_level_rewards": _rows(1, 0.0 if odd == 0.5 else odd), "response_mask": MASK}
        if name == "gae":
            found, returns = estimate(**given, values=_rows(2, odd), gamma=0.9, lam=0.95)
        else:
            known = {"reward_baselines": torch.ones(4)} if name == "remax" else {"index": UIDS}
            found, returns = estimate(**given, **known, config=None)
        return found[MASK > 0], returns[MASK > 0], whitened(_rows(5, odd), MASK)

    _is_independent(advantages)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rollout_corrections(level: str) -> None:
    config = RolloutCorrectionSection(
        rollout_is=level, rollout_rs=level, rollout_token_veto_threshold=1e-4, rollout_is_batch_normalize=True
    )
    _is_independent(lambda odd: corrections(_rows(1, odd), _rows(2, odd), MASK, config))
    _is_independent(
        lambda odd: _with_gradient(
            lambda x: compute_policy_loss_with_rollout_correction(
                _rows(2, odd), x, _rows(3, odd), MASK, rollout_is=level
            )[0],
            odd,
        )
    )


def test_masked_statistics() -> None:
    def statistics(odd: float) -> Any:
        values = _rows(1, odd)
        found = [masked_sum(values, MASK), masked_sum(values, MASK, -1), masked_mean(values, MASK)]
        return [*found, masked_var(values, MASK), masked_whiten(values, MASK)[MASK > 0]]

    _is_independent(statistics)


def test_metrics_of_a_batch() -> None:
    def metrics(odd: float) -> Any:
        names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
        columns = {name: _rows(seed, 0.0 if odd == 0.5 else odd) for seed, name in enumerate(names)}
        lengths = {"num_tokens": MASK.sum(-1).long() + 2, "responses": MASK.long()}
        return compute_data_metrics(DataProto.from_dict(columns | lengths | {"response_mask": MASK.long()}))

    _is_independent(metrics)
