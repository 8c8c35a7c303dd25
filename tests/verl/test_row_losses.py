"""A user's policy loss in upstream's form gives the engine's gradient, however rows are cut and shared by ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_from_layout
from tests.megatron.model_helpers import one_process_groups
from tests.parallel.launcher import run_ranks
from tests.verl.updates import Update, update
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.trainer.ppo.policy_losses import LOSSES
from verl.trainer.ppo.rollout_correction import LossCorrection
from verl.utils.megatron.packed_batch import pack_micro_batch
from verl.workers.actor.loss_inputs import LossInputs
from verl.workers.actor.policy_loss import PolicyLoss
from verl.workers.actor.update_metrics import UpdateMetrics
from verl.workers.config import ActorConfig
from verl.workers.config.actor import LOSS_AGG_MODES, PolicyLossConfig

ROWS, PROMPT, WIDTH = 6, 4, 5
NAME = "clipped_by_rows"


def clipped(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """PPO's loss, as a user would write it."""
    ratio = (log_prob - old_log_prob).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    lengths = response_mask.sum(-1)
    metrics = {"actor/ppo_kl": torch.zeros(()), "mine/tokens_of_a_row": lengths.mean()}
    return agg_loss(losses, response_mask, loss_agg_mode), metrics


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "entries", dict(LOSSES.entries))
    register_policy_loss(NAME)(clipped)


IN_LOSS = LossCorrection(
    RolloutCorrectionSection(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.3_3.0,0.9", bypass_mode=True)
)


def _batch(*, has_correction: bool) -> DataProto:
    """Rows of 5, 2, 0, 3, 1, 4 response tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(WIDTH)[None] < torch.tensor([5, 2, 0, 3, 1, 4])[:, None]).float()
    tensors = {
        "input_ids": torch.ones(ROWS, PROMPT + WIDTH, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(ROWS, PROMPT), mask], dim=1),
        "response_mask": mask,
        "advantages": torch.randn(ROWS, 1, generator=generator) * mask,
        "old_log_probs": torch.randn(ROWS, WIDTH, generator=generator),
        "log_probs": torch.randn(ROWS, WIDTH, generator=generator),
    }
    drift = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    tensors["rollout_log_probs"] = tensors["log_probs"] + drift
    if has_correction:
        tensors["kept_mask"] = mask * (torch.rand(ROWS, WIDTH, generator=generator) < 0.7)
        tensors["rollout_is_weights"] = torch.rand(ROWS, WIDTH, generator=generator)
    return DataProto.from_dict(tensors)


def _gradient(
    name: str,
    mode: str,
    cut: list[list[int]],
    *,
    has_correction: bool,
    groups: Any,
    correction: LossCorrection | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """d loss / d log-prob of every token [6, 5] that this rank has, and the metrics of all."""
    config = ActorConfig(
        clip_ratio=0.2, clip_ratio_c=1e9, loss_agg_mode=mode, policy_loss=PolicyLossConfig(name), entropy_coeff=0.01
    )
    batch = _batch(has_correction=has_correction)
    cpu = torch.device("cpu")
    bypass: Any = {"anchors_on_rollout": correction is not None, "correction": correction}
    inputs = LossInputs.from_batch(batch, config, groups, cpu, **bypass)
    loss_of = PolicyLoss(config, inputs, groups.cp if groups.cp.size() > 1 else None)
    log_probs = batch.batch["log_probs"].clone().requires_grad_()
    reports = []
    for rows in cut:
        given = (batch.batch[key] for key in ("input_ids", "attention_mask", "response_mask"))
        micro = pack_micro_batch(*given, rows, 1, groups.cp.size(), groups.coords.cp)
        at = (micro.rows_S, micro.cols_S)
        loss, report = loss_of(log_probs[at], log_probs.detach()[at], micro)
        loss.backward()
        reports.append(report)
    metrics = UpdateMetrics(groups, cpu)
    metrics.add(reports, grad_norm=0.0, lr=0.0, has_stepped=True)
    assert log_probs.grad is not None
    return log_probs.grad, metrics.result()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("has_correction", [False, True])
def test_a_loss_of_rows_is_the_loss_of_tokens_however_it_is_cut(mode: str, has_correction: bool) -> None:
    with one_process_groups() as groups:
        expected, of_tokens = _gradient(
            "vanilla", mode, [[0, 1, 2, 3, 4, 5]], has_correction=has_correction, groups=groups
        )
        for cut in ([[0, 1, 2, 3, 4, 5]], [[3, 5], [2], [0, 1, 4]], [[0], [1], [2], [3], [4], [5], []]):
            found, of_rows = _gradient(NAME, mode, cut, has_correction=has_correction, groups=groups)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
            assert of_rows["actor/pg_loss"] == pytest.approx(of_tokens["actor/pg_loss"], abs=1e-6)
            assert of_rows["actor/ppo_kl"] == 0.0, "what the loss reports"
            assert 1 <= of_rows["mine/tokens_of_a_row"] <= 5 and "mine/tokens_of_a_row" not in of_tokens


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_correction_in_the_loss_leaves_the_same_out_of_both_however_they_are_cut(mode: str) -> None:
    with one_process_groups() as groups:
        given: Any = {"has_correction": False, "groups": groups, "correction": IN_LOSS}
        expected, of_tokens = _gradient("vanilla", mode, [[0, 1, 2, 3, 4, 5]], **given)
        assert 0.1 < of_tokens["rollout_corr/rollout_rs_masked_fraction"] < 0.9
        assert int((expected == 0).sum()) > int((_batch(has_correction=False).batch["response_mask"] == 0).sum())
        for cut in ([[3, 5], [2], [0, 1, 4]], [[0], [1], [2], [3], [4], [5], []]):
            for name in ("vanilla", NAME):
                found, metrics = _gradient(name, mode, cut, **given)
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
                for key in ("rollout_corr/rollout_rs_masked_fraction", "actor/pg_loss"):
                    assert metrics[key] == pytest.approx(of_tokens[key], abs=1e-6)


def test_ranks_that_share_sequences_get_the_gradient_of_their_tokens() -> None:
    run_ranks(_shared_sequences, 2)


def _shared_sequences() -> None:
    """On each of two context-parallel ranks: gradients and metrics are those of the loss of tokens."""
    register_policy_loss(NAME)(clipped)
    groups = initialize_from_layout(ParallelLayout(world_size=2, context_parallel_size=2))
    for mode in LOSS_AGG_MODES:
        cut = [[3, 5], [2], [0, 1, 4]]
        given: Any = {"has_correction": False, "groups": groups, "correction": IN_LOSS}
        (in_loss, its_metrics), (by_rows, metrics_by_rows) = (
            _gradient(name, mode, cut, **given) for name in ("vanilla", NAME)
        )
        torch.testing.assert_close(by_rows, in_loss, atol=1e-6, rtol=1e-5)
        left_out = "rollout_corr/rollout_rs_masked_fraction"
        assert metrics_by_rows[left_out] == pytest.approx(its_metrics[left_out], abs=1e-6)
        wanted, of_tokens = _gradient("vanilla", mode, cut, has_correction=True, groups=groups)
        found, of_rows = _gradient(NAME, mode, cut, has_correction=True, groups=groups)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
        assert 0 < int((found != 0).sum()) < 15, "a part of the tokens"
        assert of_rows["actor/pg_loss"] == pytest.approx(of_tokens["actor/pg_loss"], abs=1e-6)
    destroy_model_parallel()


@pytest.mark.parametrize("result", [torch.zeros(()), (torch.zeros(3), {}), (0.0, {}), (torch.zeros(()), {}, {})])
def test_what_is_no_loss_is_an_error_that_says_what_to_return(result: Any) -> None:
    register_policy_loss("wrong")(lambda **_: result)
    with one_process_groups() as groups, pytest.raises(ValueError, match="the policy loss 'wrong' returned"):
        _gradient("wrong", "token-mean", [[0, 1]], has_correction=False, groups=groups)


@pytest.mark.parametrize("mode", ["gpg", "clip_cov", "kl_cov", "geo_mean", "sapo", "dppo_tv"])
def test_the_actor_updates_with_the_loss(mode: str) -> None:
    """On a tiny model, with dynamic micro-batches and a KL loss beside."""
    actor = {"policy_loss": PolicyLossConfig(mode), "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 200}
    found = run_ranks(update, 1, Update(actor=actor, num_rows=8))[0]
    assert found is not None
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
    assert max(gradient.abs().max().item() for gradient in found.gradients.values()) > 1e-4
    assert found.metrics["actor/pg_loss"] != 0 and found.metrics["actor/kl_loss"] > 0
