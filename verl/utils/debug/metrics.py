"""How far the rollout's log-probs are from the trainer's (upstream: ``verl.utils.debug.metrics``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto


def calculate_token_list_diff(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> Tensor:
    """The share of the tokens of ``mask`` that differ, of every row [B]; 1 for a row without any."""
    if tensor1.shape != tensor2.shape:
        raise ValueError(f"tokens of shapes {tuple(tensor1.shape)} and {tuple(tensor2.shape)} cannot be compared")
    chosen = mask.to(tensor1.device) > 0
    differ = ((tensor1 != tensor2.to(tensor1.device)) & chosen).sum(1)
    total = chosen.sum(1)
    return torch.where(total > 0, differ / total.clamp(min=1), torch.ones_like(differ, dtype=torch.float))


def pearson_correlation_coefficient(tensor1: Tensor, tensor2: Tensor, mask: Tensor) -> Tensor:
    """Pearson's correlation of two tensors over the elements of ``mask``."""
    if tensor1.shape != tensor2.shape:
        raise ValueError(f"values of shapes {tuple(tensor1.shape)} and {tuple(tensor2.shape)} cannot be compared")
    chosen = mask.bool()
    return torch.corrcoef(torch.stack([tensor1[chosen], tensor2[chosen]]))[0, 1].detach()


def calculate_log_prob_diff(log_probs1: Tensor, log_probs2: Tensor, mask: Tensor) -> Tensor:
    """abs(log_probs1 - log_probs2) of the elements of ``mask``, [N]."""
    return (log_probs1 - log_probs2).abs()[mask.bool()]


def calculate_debug_metrics(data: DataProto) -> dict[str, Any]:
    """``training/rollout_probs_diff_*`` and their correlation, of a batch with both kinds of log-probs.

    Reads ``rollout_log_probs``, ``old_log_probs`` [B, R], ``responses`` and ``response_mask`` (or else the end of
    ``attention_mask``; every token without both). ``training/rollout_probs_diff_valid`` is 0, and the only metric, when
    no token is scored.
    """
    batch = data.batch
    length = batch["responses"].shape[1]
    named = next((name for name in ("response_mask", "attention_mask") if name in batch), None)
    mask = (torch.ones_like(batch["old_log_probs"]) if named is None else batch[named])[:, -length:].bool()
    if not mask.any():
        return {"training/rollout_probs_diff_valid": 0}
    ours, theirs = batch["old_log_probs"].exp(), batch["rollout_log_probs"].exp()
    difference = calculate_log_prob_diff(ours, theirs, mask)
    return {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std()),
        "training/rollout_actor_probs_pearson_corr": float(pearson_correlation_coefficient(ours, theirs, mask)),
    }
