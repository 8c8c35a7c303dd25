"""A mask selects: NaN and infinities outside it change no bit of a loss, a gradient or a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.megatron.model_helpers import one_process_groups
from verl.protocol import DataProto
from verl.trainer.config.algorithm import AlgorithmSection, RolloutCorrectionSection
from verl.trainer.ppo import core_algos, metric_utils, rollout_correction
from verl.trainer.ppo.algos import ESTIMATORS
from verl.trainer.ppo.filter_groups import groups_of
from verl.trainer.ppo.policy_losses import LOSSES
from verl.trainer.ppo.scores import REWARD_PARTS
from verl.trainer.ppo.step_functions import apply_kl_penalty, compute_advantage
from verl.utils import torch_functional as F
from verl.utils.megatron.packed_batch import pack_micro_batch
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_loss import PolicyLoss
from verl.workers.config import ActorConfig
from verl.workers.config.actor import LOSS_AGG_MODES, PolicyLossConfig

ROWS, WIDTH = 4, 6
# Ends, a gap as of a tool's answer, and a row without any token.
MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).float()
JUNK = torch.tensor([float("nan"), float("inf"), float("-inf")])
UID = ["a", "a", "b", "b"]
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "abs+", "k3+", "low_var_kl+")

Results = dict[str, Tensor | float]
Compute = Callable[[dict[str, Tensor]], Results]


def _inputs() -> dict[str, Tensor]:
    """Log-probs, rewards and the like [4, 6], finite in every place; zeros outside the mask where they count there."""
    generator = torch.Generator().manual_seed(0)
    names = ("log_prob", "old", "ref", "rollout", "advantages", "values", "returns", "weights")
    found = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in names}
    found["weights"] = found["weights"].abs()
    return found | {"rewards": torch.randn(ROWS, WIDTH, generator=generator) * MASK}


def _with_junk(inputs: dict[str, Tensor], mask: Tensor = MASK) -> dict[str, Tensor]:
    """NaN, inf and -inf outside the mask, of each input in another order."""
    places = (mask == 0).nonzero(as_tuple=True)
    found = {}
    for shift, (name, values) in enumerate(sorted(inputs.items())):
        junk = JUNK[(torch.arange(len(places[0])) + shift) % 3]
        found[name] = values.clone()
        found[name][places] = junk.view(-1, *[1] * (values.ndim - 2)).expand_as(values[places])
    return found


def _same(compute: Compute, inputs: dict[str, Tensor] | None = None, mask: Tensor = MASK) -> None:
    inputs = _inputs() if inputs is None else inputs
    clean, dirty = compute(inputs), compute(_with_junk(inputs, mask))
    assert clean.keys() == dirty.keys() and clean
    for name, value in clean.items():
        expected = torch.as_tensor(value)
        assert expected.isfinite().all(), f"{name} is not finite without any junk"
        assert torch.equal(expected, torch.as_tensor(dirty[name])), f"{name}: {expected}, with junk {dirty[name]}"


def _gradients(loss: Tensor, of: dict[str, Tensor]) -> Results:
    loss.backward()
    return {"loss": loss.detach()} | {f"d {name}": leaf.grad for name, leaf in of.items() if leaf.grad is not None}


def _leaves(given: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: given[name].clone().requires_grad_() for name in names}


@pytest.mark.parametrize("name", sorted(ESTIMATORS.entries))
def test_of_every_advantage_estimator(name: str) -> None:
    def compute(given: dict[str, Tensor]) -> Results:
        batch = DataProto.from_dict(
            {
                "token_level_rewards": given["rewards"],
                "response_mask": MASK,
                "values": given["values"],
                "reward_baselines": torch.arange(4.0),
            },
            {"uid": UID, REWARD_PARTS: np.array([{"form": float(row)} for row in range(4)], dtype=object)},
        )
        section = AlgorithmSection(gdpo_reward_keys=["form"])
        found = compute_advantage(batch, name, gamma=0.9, lam=0.8, config=section).batch
        return {key: found[key] for key in ("advantages", "returns")}

    _same(compute)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(LOSSES.entries))
def test_of_every_policy_loss_and_aggregation(name: str, mode: str) -> None:
    config = ActorConfig(policy_loss=PolicyLossConfig(name, clip_cov_ratio=0.3, clip_cov_lb=0.0, kl_cov_ratio=0.3))

    def compute(given: dict[str, Tensor]) -> Results:
        leaves = _leaves(given, "old", "log_prob", "advantages")
        loss, metrics = LOSSES.get(name)(*leaves.values(), MASK, mode, config, given["weights"])
        return metrics | _gradients(loss, leaves)

    _same(compute)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_of_every_kl_estimate(mode: str) -> None:
    def kl(kind: str) -> Compute:
        def compute(given: dict[str, Tensor]) -> Results:
            leaves = _leaves(given, "log_prob", "ref")
            return _gradients(core_algos.agg_loss(core_algos.kl_penalty(*leaves.values(), kind), MASK, mode), leaves)

        return compute

    for kind in KL:
        _same(kl(kind))


def test_a_kl_estimate_that_counts_keeps_its_nan() -> None:
    """A gradient that is not finite skips an update, so it may be 0 only where no loss reads the estimate."""
    for kind in ("k2", "k3+"):
        log_prob = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        kl = core_algos.kl_penalty(log_prob, torch.tensor([[float("nan"), -2.0]]), kind)
        core_algos.agg_loss(kl, torch.ones(1, 2), "token-mean").backward()
        assert log_prob.grad is not None and log_prob.grad.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_of_rollout_corrections(level: str) -> None:
    section = RolloutCorrectionSection(
        rollout_is=level, rollout_rs=level, rollout_token_veto_threshold=0.05, rollout_is_batch_normalize=True
    )

    def of_a_run(given: dict[str, Tensor]) -> Results:
        weights, kept, metrics = rollout_correction.corrections(given["old"], given["rollout"], MASK, section)
        assert weights is not None
        return metrics | {"weights": weights, "kept": kept}

    _same(of_a_run)


def test_of_masked_statistics() -> None:
    def of(function: Callable[..., Tensor], *, selects: bool = False) -> Compute:
        def compute(given: dict[str, Tensor]) -> Results:
            leaves = _leaves(given, "values")
            found = function(leaves["values"], MASK)
            return {"value": found.detach()[MASK.bool()] if selects else found.detach()} | _gradients(
                (found * MASK).square().sum(), leaves
            )

        return compute

    for function in (F.masked_sum, F.masked_mean, F.masked_var):
        _same(of(function))
    _same(of(F.masked_whiten, selects=True))


def test_of_the_metrics_of_a_batch() -> None:
    def compute(given: dict[str, Tensor]) -> Results:
        batch = DataProto.from_dict(
            {name: given[key] for name, key in (("old_log_probs", "old"), ("ref_log_prob", "ref"))}
            | {"token_level_scores": given["rewards"], "advantages": given["advantages"], "returns": given["returns"]}
            | {"values": given["values"], "response_mask": MASK, "responses": torch.zeros(ROWS, WIDTH).long()}
            | {"num_tokens": MASK.sum(-1).long() + 2},
            {"uid": UID, REWARD_PARTS: [{}, {}, {}, {}]},
        )
        controller = core_algos.AdaptiveKLController(0.1, 0.1, 100)
        batch, metrics = apply_kl_penalty(batch, controller, "k3")
        groups = {f"rewards of {group.uid}": torch.from_numpy(group.rewards) for group, _ in groups_of(batch)}
        return metrics | groups | metric_utils.compute_data_metrics(batch) | {"coefficient": controller.value}

    _same(compute)


def test_a_finite_reward_outside_the_mask_counts() -> None:
    """The score of an empty response lies there, as does that of one whose last token a correction rejected."""
    rewards = torch.tensor([[0.0, -1.0], [0.0, 1.0]])
    advantages, _ = core_algos.compute_rloo_outcome_advantage(rewards, torch.tensor([[0.0, 0.0], [1.0, 0.0]]), [0, 0])
    assert advantages.tolist() == [[0.0, 0.0], [2.0, 0.0]]


def _of_a_user(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **others: Any
) -> tuple[Tensor, dict[str, Any]]:
    """A loss as a user may write it: a product with the mask."""
    losses = -advantages * (log_prob - old_log_prob).exp() * response_mask * others["rollout_is_weights"]
    return losses.sum(), {}


@pytest.mark.parametrize("mode", [*sorted(LOSSES.entries), "of_a_user"])
def test_of_what_a_correction_rejected(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's loss, with KL and entropy, reads nothing of a response token whose weight is 0."""
    monkeypatch.setattr(LOSSES, "entries", LOSSES.entries | {"of_a_user": _of_a_user})
    kept = MASK * torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    policy = PolicyLossConfig(mode, clip_cov_ratio=0.3, clip_cov_lb=0.0, kl_cov_ratio=0.3)
    config = ActorConfig(policy_loss=policy, entropy_coeff=0.1, use_kl_loss=True, kl_loss_type="k2")
    attention = torch.cat([torch.ones(ROWS, 1), MASK], dim=1)
    attention[1] = torch.tensor([1, 1, 1, 1, 1, 1, 0])
    ids = torch.ones(ROWS, 1 + WIDTH, dtype=torch.long)

    def compute(given: dict[str, Tensor]) -> Results:
        columns = {name: given[key] for name, key in (("old_log_probs", "old"), ("ref_log_prob", "ref"))}
        columns |= {"rollout_is_weights": given["weights"], "advantages": given["advantages"]}
        batch = DataProto.from_dict(
            columns | {"response_mask": MASK, "kept_mask": kept, "attention_mask": attention, "input_ids": ids}
        )
        with one_process_groups() as groups:
            inputs = LossInputs.from_batch(batch, config, groups, torch.device("cpu"))
            leaves = _leaves(given, "log_prob", "values")
            micro = pack_micro_batch(ids, attention, MASK, [0, 1, 2, 3], 1, 1, 0)
            at = (micro.rows_S, micro.cols_S)
            loss, _ = PolicyLoss(config, inputs)(leaves["log_prob"][at], leaves["values"][at], micro)
        return _gradients(loss, leaves)

    # Zeros in their place, because the ratio of a sequence (gspo, geo_mean) is over all of its response tokens.
    _same(compute, {name: values * kept for name, values in _inputs().items()}, kept)
