"""Upstream's functions of rollout correction, for batches that are all here.

``verl.trainer.ppo.rollout_correction`` has the arithmetic, which a run calls with sums over its ranks. Functions of a
part of it name metrics without the prefix ``rollout_corr/``, those of the whole with it, as upstream.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionSection
from verl.trainer.ppo import rollout_correction as arithmetic
from verl.trainer.ppo.aggregation import agg_loss
from verl.trainer.ppo.rollout_correction import PREFIX, SAFETY_BOUND
from verl.utils.masks import selected

__all__ = [
    "SAFETY_BOUND",
    "apply_rollout_correction",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_policy_loss_with_rollout_correction",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
]


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token",
    rollout_rs_threshold: float | None = None,
    rollout_rs_threshold_lower: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(1 on response tokens that stay, metrics); ValueError without the upper threshold."""
    if rollout_rs_threshold is None:
        raise ValueError("rollout_rs_threshold is absent; give the upper bound of the ratios that stay")
    kept, metrics = arithmetic.compute_rollout_rejection_mask(
        log_ratio, response_mask, rollout_rs, rollout_rs_threshold, rollout_rs_threshold_lower
    )
    return kept, _plain(metrics)


def compute_rs_metrics(
    rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_rs: str,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
) -> dict[str, float]:
    """How the ratios lie to both thresholds; ``rollout_is_weights`` are not read: they are cut."""
    found = _spread(log_ratio_for_metrics, response_mask, rollout_rs)
    found["fraction_high"] = float((found["ratios"] > rollout_rs_threshold).float().mean())
    found["fraction_low"] = float((found["ratios"] < rollout_rs_threshold_lower).float().mean())
    del found["ratios"]
    return {f"rollout_rs_{name}": value for name, value in found.items()}


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """(weights [B, R] that are cut at the threshold, metrics); ValueError for a threshold that is not above 0."""
    if rollout_is_threshold <= 0:
        raise ValueError(f"rollout_is_threshold is {rollout_is_threshold}; expected above 0")
    weights, metrics = arithmetic.compute_rollout_correction_weights(
        log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
    )
    return weights, _plain(metrics)


def compute_is_metrics(
    rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
) -> dict[str, float]:
    """How the ratios spread before the cut, and the effective sample size of the weights."""
    found = _spread(log_ratio_for_metrics, response_mask, rollout_is)
    found["ratio_fraction_high"] = float((found["ratios"] > rollout_is_threshold).float().mean())
    found["ratio_fraction_low"] = float((found["ratios"] < 1.0 / rollout_is_threshold).float().mean())
    weights = rollout_is_weights[response_mask.bool()]
    found["eff_sample_size"] = float(weights.sum().square() / (len(weights) * weights.square().sum()))
    del found["ratios"]
    return {f"rollout_is_{name}": value for name, value in found.items()}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | None = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = 2.0,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(a batch with ``rollout_is_weights`` or None, the response mask without what is rejected, metrics).

    The keys are those of ``algorithm.rollout_correction``; all tensors are [B, R].

    Raises:
        ValueError: a key has a value that the config would refuse, or there is no response token.
    """
    config = RolloutCorrectionSection(
        rollout_is=rollout_is,
        rollout_is_threshold=2.0 if rollout_is_threshold is None else rollout_is_threshold,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
        rollout_rs_threshold_lower=rollout_rs_threshold_lower,
        rollout_token_veto_threshold=rollout_token_veto_threshold,
        rollout_is_batch_normalize=rollout_is_batch_normalize and rollout_is is not None,
    )
    problems = config.problems("rollout_correction")
    if problems:
        raise ValueError("; ".join(problems))
    if not response_mask.any():
        raise ValueError("response_mask has no token: there is nothing to correct")
    weights, kept, metrics = arithmetic.corrections(old_log_prob, rollout_log_prob, response_mask, config)
    found = None if weights is None else DataProto.from_dict({"rollout_is_weights": weights})
    return found, kept.to(response_mask.dtype), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """How far apart the policies are; without the rollout's log-probs ``training_ppl`` alone."""
    rollout = old_log_prob if rollout_log_prob is None else rollout_log_prob
    found = arithmetic.compute_offpolicy_metrics(old_log_prob, rollout, response_mask)
    plain = _plain(found)
    return plain if rollout_log_prob is not None else {"training_ppl": plain["training_ppl"]}


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Any
) -> tuple[DataProto, dict[str, float]]:
    """(the batch with ``rollout_is_weights``, where asked for, and ``response_mask`` without rejected tokens, metrics).

    ``rollout_corr_config`` is the section ``algorithm.rollout_correction``, or a mapping with its keys.
    """
    keys = {field.name for field in fields(RolloutCorrectionSection)} - {"bypass_mode"}
    given = {key: value for key in keys if (value := _knob(rollout_corr_config, key)) is not None}
    given.setdefault("rollout_rs_threshold", given.get("rollout_is_threshold", 2.0))
    tensors = batch.batch
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        tensors["old_log_probs"], tensors["rollout_log_probs"], tensors["response_mask"], **given
    )
    tensors["response_mask"] = mask
    if weights is not None:
        batch = batch.union(weights)
    return batch, metrics


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """``compute_offpolicy_metrics`` of the current policy, under the names of a run."""
    return arithmetic.compute_offpolicy_metrics(log_prob.detach(), rollout_log_prob, response_mask)


def apply_rollout_correction(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """Bypass mode: the rollout's log-probs become the old ones of the batch, in place.

    Raises:
        ValueError: the batch has none, or ``use_policy_gradient`` asks for a loss that corrects itself
            (``compute_policy_loss_with_rollout_correction`` computes it).
    """
    if "rollout_log_probs" not in batch.batch:
        raise ValueError(
            "bypass mode: the batch has no rollout_log_probs; set actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if _knob(rollout_corr_config, "use_policy_gradient"):
        raise ValueError("use_policy_gradient is not there; leave it out and choose policy_loss.loss_mode=gpg")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]


def compute_policy_loss_with_rollout_correction(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    eos_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    loss_scale_factor: float = 1.0,
    rollout_is: str | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | None = None,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """(-sg[w] A log_prob aggregated over what is not rejected, times ``loss_scale_factor``; metrics).

    The ratios are those of the current policy to the rollout's, so that no old log-probs are needed; w is 1 without
    ``rollout_is``. All tensors are [B, R].
    """
    with torch.no_grad():
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
            log_prob.detach(),
            rollout_log_prob,
            eos_mask,
            rollout_is,
            rollout_is_threshold,
            rollout_rs,
            rollout_rs_threshold,
            rollout_rs_threshold_lower,
            rollout_token_veto_threshold,
            rollout_is_batch_normalize,
        )
    loss = -selected(advantages, mask) * selected(log_prob, mask)
    if weights is not None:
        loss = loss * weights.batch["rollout_is_weights"]
    return agg_loss(loss, mask, loss_agg_mode) * loss_scale_factor, metrics


def _spread(log_ratio: Tensor, response_mask: Tensor, level: str) -> dict[str, Any]:
    """``ratios`` of tokens or, at other levels, of sequences with tokens, and their mean, deviation and ends."""
    mask = response_mask.to(log_ratio.dtype)
    ratios = arithmetic.ratio_at_level(log_ratio, mask, level)
    chosen = ratios[mask > 0] if level == "token" else ratios[mask.sum(-1) > 0][:, 0]
    return {
        "ratios": chosen,
        "mean": float(chosen.mean()),
        "std": float(chosen.std(unbiased=False)),
        "max": float(chosen.max()),
        "min": float(chosen.min()),
    }


def _plain(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in metrics.items()}


def _knob(config: Any, name: str) -> Any:
    if config is None:
        return None
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)
