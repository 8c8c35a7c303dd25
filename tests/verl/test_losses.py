"""The loss of packed micro-batches: the same number however it is cut, exactly on-policy without old log-probs."""

from __future__ import annotations

import pytest
import torch

from tests.megatron.model_helpers import one_process_groups
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty, token_loss_weights
from verl.utils.megatron.packed_batch import PackedMicroBatch, pack_micro_batch
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_loss import PolicyLoss
from verl.workers.actor.update_metrics import UpdateMetrics
from verl.workers.config import ActorConfig
from verl.workers.config.actor import LOSS_AGG_MODES

ROWS, WIDTH = 4, 5


def _tensors() -> dict[str, torch.Tensor]:
    """log-probs, masks and advantages [4, 5]; the third response is empty."""
    generator = torch.Generator().manual_seed(0)
    names = ("log_probs", "old_log_probs", "ref_log_prob", "advantages", "entropy")
    tensors = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in names}
    tensors["rollout_log_probs"] = tensors["log_probs"].clamp(max=0)
    lengths = torch.tensor([5, 2, 0, 3])
    return tensors | {"mask": (torch.arange(WIDTH)[None] < lengths[:, None]).float()}


def _inputs(tensors: dict[str, torch.Tensor], mode: str, *, is_on_policy: bool) -> LossInputs:
    mask = tensors["mask"]
    return LossInputs(
        weights=token_loss_weights(
            mask, mode, num_tokens=float(mask.sum()), num_sequences=float((mask.sum(-1) > 0).sum())
        ),
        advantages=tensors["advantages"],
        old_log_probs=None if is_on_policy else tensors["old_log_probs"],
        ref_log_prob=tensors["ref_log_prob"],
        rollout_log_probs=tensors["rollout_log_probs"],
        response_lengths=mask.sum(-1),
    )


def _micro(mask: torch.Tensor, rows: list[int]) -> PackedMicroBatch:
    """``rows`` packed, with a prompt of one token each."""
    attention = torch.cat([torch.ones(ROWS, 1), mask], dim=1)
    return pack_micro_batch(torch.zeros(ROWS, 1 + WIDTH, dtype=torch.long), attention, mask, rows, 1)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("cut", [[[0, 1, 2, 3]], [[3], [1, 2], [0]], [[0], [1], [2], [3]]])
def test_micro_batches_add_up_to_the_loss_of_the_batch(mode: str, cut: list[list[int]]) -> None:
    config = ActorConfig(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    tensors = _tensors()
    mask, log_probs, entropy = tensors["mask"], tensors["log_probs"], tensors["entropy"]
    loss_of = PolicyLoss(config, _inputs(tensors, mode, is_on_policy=False))
    outputs = []
    for rows in cut:
        micro = _micro(mask, rows)
        at = (micro.rows_S, micro.cols_S)
        outputs.append(loss_of(log_probs[at], entropy[at], micro))
    kl = agg_loss(kl_penalty(log_probs, tensors["ref_log_prob"], "low_var_kl"), mask, mode)
    pg, _ = get_policy_loss_fn("vanilla")(
        tensors["old_log_probs"], log_probs, tensors["advantages"], mask, mode, config
    )
    expected = pg + 0.1 * kl - 0.01 * agg_loss(entropy, mask, mode)
    assert torch.stack([loss for loss, _ in outputs]).sum().item() == pytest.approx(expected.item(), abs=1e-6)

    with one_process_groups() as groups:
        metrics = UpdateMetrics(groups, torch.device("cpu"))
        metrics.add([report for _, report in outputs], grad_norm=2.0, lr=0.5, has_stepped=False)
        result = metrics.result()
    assert result["actor/pg_loss"] == pytest.approx(pg.item(), abs=1e-6)
    assert result["actor/kl_loss"] == pytest.approx(kl.item(), abs=1e-6)
    assert result["actor/entropy"] == pytest.approx((entropy * mask).sum().item() / 10, abs=1e-6)
    assert (result["actor/grad_norm"], result["actor/lr"], result["actor/skipped_steps"]) == (2.0, 0.5, 1.0)
    gap = (tensors["old_log_probs"].exp() - tensors["rollout_log_probs"].exp()).abs() * mask  # of the policy that acted
    assert result["training/rollout_probs_diff_max"] == pytest.approx(gap.max().item(), rel=1e-5)
    assert result["training/rollout_probs_diff_mean"] == pytest.approx(gap.sum().item() / 10, rel=1e-5)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    tensors = _tensors()
    inputs = _inputs(tensors, "token-mean", is_on_policy=True)
    micro = _micro(tensors["mask"], [0, 1, 2, 3])
    at = (micro.rows_S, micro.cols_S)
    log_probs_S = tensors["log_probs"][at].requires_grad_()
    _, report = PolicyLoss(ActorConfig(), inputs)(log_probs_S, tensors["entropy"][at], micro)
    loss, _ = PolicyLoss(
        ActorConfig(),
        LossInputs(weights=inputs.weights, advantages=inputs.advantages, response_lengths=inputs.response_lengths),
    )(log_probs_S, tensors["entropy"][at], micro)
    loss.backward()
    assert log_probs_S.grad is not None
    assert torch.allclose(log_probs_S.grad, -tensors["advantages"][at] / 10)
    with one_process_groups() as groups:
        metrics = UpdateMetrics(groups, torch.device("cpu"))
        metrics.add([report], grad_norm=1.0, lr=0.1, has_stepped=True)
        result = metrics.result()
    assert result["actor/ppo_kl"] == result["actor/pg_clipfrac"] == result["actor/pg_clipfrac_lower"] == 0.0
    gap = (tensors["log_probs"].exp() - tensors["rollout_log_probs"].exp()).abs() * tensors["mask"]
    assert result["training/rollout_probs_diff_max"] == pytest.approx(gap.max().item(), rel=1e-5)


def test_a_rank_without_response_tokens_has_a_loss_of_zero_that_can_be_differentiated() -> None:
    tensors = _tensors()
    micro = _micro(tensors["mask"], [2])
    log_probs_S = torch.zeros(0, requires_grad=True)
    loss, _ = PolicyLoss(ActorConfig(), _inputs(tensors, "token-mean", is_on_policy=False))(
        log_probs_S, torch.zeros(0), micro
    )
    loss.backward()
    assert loss.item() == 0.0
