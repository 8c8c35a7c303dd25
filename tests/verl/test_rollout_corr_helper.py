"""Upstream's functions of rollout correction on two sequences of two tokens, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import rollout_corr_helper as helper
from verl.trainer.ppo.core_algos import compute_policy_loss_with_rollout_correction

RATIOS = torch.tensor([[1.0, 3.0], [0.5, 1.0]])  # of training to rollout; sequences: 3 and 0.5
ROLLOUT = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
OLD = ROLLOUT + RATIOS.log()
MASK = torch.ones(2, 2, dtype=torch.int64)


def test_weights_and_their_metrics() -> None:
    weights, metrics = helper.compute_rollout_correction_weights(RATIOS.log(), MASK, "token", 2.0)
    assert torch.allclose(weights, torch.tensor([[1.0, 2.0], [0.5, 1.0]]))
    assert metrics["rollout_is_mean"] == pytest.approx(4.5 / 4)
    assert metrics["rollout_is_ratio_fraction_high"] == 0.25
    weights, _ = helper.compute_rollout_correction_weights(RATIOS.log(), MASK, "sequence", 2.0, True)
    assert torch.allclose(weights, torch.tensor([[2.0, 2.0], [0.5, 0.5]]) / 1.25)
    found = helper.compute_is_metrics(torch.tensor([[1.0, 2.0], [0.5, 1.0]]), RATIOS.log(), MASK, "token", 2.0)
    assert (found["rollout_is_max"], found["rollout_is_min"]) == (pytest.approx(3), pytest.approx(0.5))
    assert found["rollout_is_eff_sample_size"] == pytest.approx(4.5**2 / (4 * 6.25))
    with pytest.raises(ValueError, match="expected above 0"):
        helper.compute_rollout_correction_weights(RATIOS.log(), MASK, rollout_is_threshold=0.0)


def test_rejection_and_its_metrics() -> None:
    kept, metrics = helper.compute_rollout_rejection_mask(RATIOS.log(), MASK, "token", 2.0)
    assert kept.tolist() == [[1, 0], [1, 1]] and metrics["rollout_rs_masked_fraction"] == 0.25
    kept, _ = helper.compute_rollout_rejection_mask(RATIOS.log(), MASK, "sequence", 4.0, 0.9)
    assert kept.tolist() == [[1, 1], [0, 0]]
    found = helper.compute_rs_metrics(RATIOS, RATIOS.log(), MASK, "sequence", 2.0, 0.9)
    assert (found["rollout_rs_fraction_high"], found["rollout_rs_fraction_low"]) == (0.5, 0.5)
    assert found["rollout_rs_mean"] == pytest.approx(1.75)
    with pytest.raises(ValueError, match="rollout_rs_threshold is absent"):
        helper.compute_rollout_rejection_mask(RATIOS.log(), MASK)


def test_both_together() -> None:
    weights, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
        OLD, ROLLOUT, MASK, "token", 2.0, "token", 2.0, rollout_token_veto_threshold=0.6
    )
    assert weights is not None and weights.batch["rollout_is_weights"].tolist() == [
        pytest.approx([1, 2]),
        pytest.approx([0.5, 1]),
    ]
    assert mask.tolist() == [[1, 0], [0, 0]] and mask.dtype == MASK.dtype, "the second sequence is vetoed"
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.5) / 4, abs=1e-6)
    weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, MASK)
    assert weights is None and torch.equal(mask, MASK)
    with pytest.raises(ValueError, match="rollout_is is 'batch'"):
        helper.compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, MASK, "batch")
    with pytest.raises(ValueError, match="has no token"):
        helper.compute_rollout_correction_and_rejection_mask(OLD, ROLLOUT, 0 * MASK, "token")


def test_off_policy_metrics() -> None:
    found = helper.compute_offpolicy_metrics(OLD, ROLLOUT, MASK)
    assert found["kl"] == pytest.approx(-math.log(1.5) / 4, abs=1e-6)
    assert found["k3_kl"] == pytest.approx((5.5 - math.log(1.5) - 4) / 4, abs=1e-6)
    assert found["rollout_ppl"] == pytest.approx((math.exp(1.5) + math.exp(1.0)) / 2, rel=1e-5)
    assert helper.compute_offpolicy_metrics(OLD, None, MASK) == {"training_ppl": found["training_ppl"]}
    named = helper.compute_rollout_corr_metrics_from_logprobs(OLD, ROLLOUT, MASK)
    assert named == {f"rollout_corr/{name}": value for name, value in found.items()}


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_batch_gets_its_weights_and_loses_rejected_tokens(as_mapping: bool) -> None:
    tensors = {"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK}
    keys = {"rollout_is": "token", "rollout_rs": "token", "rollout_rs_threshold": 2.0}
    config = keys if as_mapping else RolloutCorrectionConfig(**keys)  # type: ignore[arg-type]
    batch, metrics = helper.compute_rollout_correction_and_add_to_batch(DataProto.from_dict(tensors), config)
    assert batch.batch["response_mask"].tolist() == [[1, 0], [1, 1]]
    assert torch.allclose(batch.batch["rollout_is_weights"], RATIOS.clamp(max=2.0))
    assert "rollout_corr/rollout_is_mean" in metrics


def test_bypass_mode_takes_the_rollouts_log_probs() -> None:
    batch = DataProto.from_dict({"rollout_log_probs": ROLLOUT})
    helper.apply_rollout_correction(batch, RolloutCorrectionConfig(bypass_mode=True))
    assert torch.equal(batch.batch["old_log_probs"], ROLLOUT)
    with pytest.raises(ValueError, match="use_policy_gradient is not there"):
        helper.apply_rollout_correction(batch, {"use_policy_gradient": True})
    with pytest.raises(ValueError, match="no rollout_log_probs"):
        helper.apply_rollout_correction(DataProto.from_dict({"old_log_probs": OLD}))


def test_the_policy_gradient_that_corrects_itself() -> None:
    new = OLD.clone().requires_grad_()
    loss, metrics = compute_policy_loss_with_rollout_correction(
        ROLLOUT, new, torch.tensor([[2.0, 2.0], [-1.0, -1.0]]), MASK, loss_scale_factor=0.5, rollout_is="token"
    )
    loss.backward()
    assert new.grad is not None
    expected = -torch.tensor([[2.0, 4.0], [-0.5, -1.0]]) / 2 * 0.5  # weight times advantage, over two sequences
    assert torch.allclose(new.grad, expected) and metrics["rollout_corr/rollout_is_mean"] == pytest.approx(4.5 / 4)
