"""What micro-batches report of an update, and the metrics that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from verl.utils.megatron.reduce import mean_by_name, reduce_over


class TokenSums(NamedTuple):
    """Sums over scored tokens: tensors of a micro-batch (None: 0), numbers of an update.

    ``pg_loss`` and ``kl_loss`` are weighted sums, the parts of the loss. x is the probability of a token in training,
    y that in the rollout.
    """

    pg_loss: Any = None
    kl_loss: Any = None
    entropy: Any = None
    clipfrac: Any = None
    clipfrac_lower: Any = None
    approx_kl: Any = None
    prob_diff: Any = None
    prob_x: Any = None
    prob_y: Any = None
    prob_xx: Any = None
    prob_yy: Any = None
    prob_xy: Any = None
    tokens: Any = None

    def packed(self, zero: Tensor) -> Tensor:
        """All but the tokens in one tensor with the type and the device of ``zero``, without gradients."""
        return torch.stack([zero if value is None else value.detach().to(zero.dtype) for value in self[:-1]])


@dataclass(frozen=True)
class MicroReport:
    """What the loss of one micro-batch reports.

    Attributes:
        sums: packed ``TokenSums``, fp64 on a CPU and fp32 on accelerators.
        largest: the largest difference of a token's probabilities in training and in the rollout.
        num_tokens: the scored tokens.
        has_rollout: the rollout's log-probs were there to compare with.
        metrics: what the policy loss itself reports, None where it has nothing of its own.
    """

    sums: Tensor
    largest: Tensor
    num_tokens: int
    has_rollout: bool
    metrics: Mapping[str, float] | None


class UpdateMetrics:
    """Adds up what the micro-batches of an update report and turns it into verl's metrics."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device  # of the collectives
        self._reports: list[MicroReport] = []
        self._grad_norms: list[float] = []
        self._num_skipped = 0
        self._lr = 0.0

    def add(self, reports: list[MicroReport], grad_norm: float, lr: float, has_stepped: bool) -> None:
        """One optimizer step: the reports of its micro-batches, the norm before clipping, the rate used."""
        self._reports.extend(reports)
        self._grad_norms.append(grad_norm)
        self._num_skipped += not has_stepped
        self._lr = lr

    def result(self) -> dict[str, float]:
        """Metrics over all replicas and their context-parallel parts; every rank of the last stage must call it."""
        group, device, reports = self._groups.dp_cp, self._device, self._reports
        num_tokens = torch.tensor([sum(report.num_tokens for report in reports)])
        sums = torch.cat((torch.stack([report.sums for report in reports]).cpu().double().sum(0), num_tokens))
        largest = torch.stack([report.largest for report in reports]).cpu().double().max()
        sums = reduce_over(sums, group, dist.ReduceOp.SUM, device)
        largest = reduce_over(largest, group, dist.ReduceOp.MAX, device)
        total = TokenSums(*sums.tolist())
        tokens, steps = max(total.tokens, 1.0), max(len(self._grad_norms), 1)
        metrics = {
            "actor/pg_loss": total.pg_loss / steps,
            "actor/kl_loss": total.kl_loss / steps,
            "actor/entropy": total.entropy / tokens,
            "actor/pg_clipfrac": total.clipfrac / tokens,
            "actor/pg_clipfrac_lower": total.clipfrac_lower / tokens,
            "actor/ppo_kl": total.approx_kl / tokens,
            "actor/grad_norm": sum(self._grad_norms) / steps,
            "actor/lr": self._lr,
            "actor/skipped_steps": float(self._num_skipped),
        }
        if any(report.has_rollout for report in reports):
            metrics |= {
                "training/rollout_probs_diff_max": float(largest),
                "training/rollout_probs_diff_mean": total.prob_diff / tokens,
                "training/rollout_actor_probs_pearson_corr": _pearson(total, tokens),
            }
        if any(report.metrics is not None for report in reports):  # the same on all ranks: it depends on the loss
            metrics |= mean_by_name([(report.metrics or {}, report.num_tokens) for report in reports], group)
        return metrics


def sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type == "cpu" else torch.float32


def _pearson(total: TokenSums, count: float) -> float:
    covariance = total.prob_xy / count - total.prob_x * total.prob_y / count**2
    variance_x = total.prob_xx / count - (total.prob_x / count) ** 2
    variance_y = total.prob_yy / count - (total.prob_y / count) ** 2
    scale = (max(variance_x, 0.0) * max(variance_y, 0.0)) ** 0.5
    return float(covariance / scale) if scale > 0 else 1.0
