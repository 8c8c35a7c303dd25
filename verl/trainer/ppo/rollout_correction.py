"""Importance sampling and rejection between the policy that sampled and the one that is trained.

Both engines hold the same weights, but their numbers differ: r = exp(old_log_prob - rollout_log_prob) is not 1. With r
of a token, of its sequence (the product over the tokens) or their geometric mean,

    weights   TIS, truncated importance sampling: min(r, C), a factor of the policy loss without gradient
              (F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). With two
              bounds r where lower <= r <= upper, else 0: IcePop (Ling team, arXiv 2510.18855)
    rejection MIS, masked importance sampling: what has k1 = r outside [lower, upper], or k2 = (log r)^2 / 2 or
              k3 = r - 1 - log r above a bound, is left out of the loss: a token, or a sequence by the sum (of k1: the
              product), the mean (of k1: the geometric one) or the largest of its tokens (verl's docs/algo/
              rollout_corr.md; for sequences: Trust Region Masking, arXiv 2512.23075)
    veto      a sequence is left out when any of its tokens has r below a threshold.

What is left out does not count in the denominators of the loss either, as in verl. A token of weight 0 does.

In bypass mode there is no old policy, and r = exp(log_prob - rollout_log_prob), without gradient, of the policy that is
updated. It is known in the loss, after the denominators: what is left out there counts in them (``LossCorrection``).

Functions take rows [B, R] of this rank; ``over_ranks`` adds sums up over all data-parallel ranks, so that every metric
and the normalisation are those of the whole batch. All of it is without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from verl.protocol import DataProto
from verl.trainer.config.algorithm import OF_LEVEL, RolloutCorrectionSection, bounds_of
from verl.utils.masks import selected
from verl.utils.megatron.reduce import reduce_over

SAFETY_BOUND = 20.0  # of log-ratios before exp; e^20 is far beyond every threshold
PREFIX = "rollout_corr/"

# Adds a float64 vector up over ranks.
OverRanks = Callable[[Tensor], Tensor]


def one_rank(sums: Tensor) -> Tensor:
    """The batch is all here."""
    return sums


def corrections(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionSection,
    over_ranks: OverRanks = one_rank,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """(weights [B, R] or None, kept response tokens [B, R], metrics); weights are 0 outside the response."""
    mask = response_mask.to(old_log_prob.dtype)
    log_ratio = selected(old_log_prob - rollout_log_prob, mask)
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask, over_ranks)
    weights, kept = None, mask
    if config.rollout_is is not None:
        weights, found = compute_rollout_correction_weights(log_ratio, mask, config, over_ranks)
        metrics |= found
    if config.rollout_rs is not None:
        kept, found = compute_rollout_rejection_mask(log_ratio, mask, config, over_ranks)
        metrics |= found
    if config.rollout_token_veto_threshold is not None:
        is_vetoed = (_ratio(log_ratio) < config.rollout_token_veto_threshold) & (mask > 0)
        kept = kept * (~is_vetoed.any(-1, keepdim=True)).to(mask.dtype)
        metrics |= _shares(is_vetoed, mask, over_ranks, "rollout_is_veto_fraction", "rollout_is_catastrophic_fraction")
    return weights, kept, metrics


@dataclass(frozen=True)
class LossCorrection:
    """``bypass_mode``: corrects the loss by the policy that is updated; weights are divided by ``mean_weight``."""

    config: RolloutCorrectionSection
    mean_weight: float = 1.0

    @classmethod
    def of(cls, config: RolloutCorrectionSection, metrics: Mapping[str, float]) -> LossCorrection | None:
        """That of a batch with ``metrics`` of its old log-probs, if it has any; None without ``bypass_mode``."""
        in_loss, mean = config.in_loss, metrics.get(f"{PREFIX}rollout_is_mean") or 1.0
        return None if in_loss is None else cls(in_loss, mean if config.rollout_is_batch_normalize else 1.0)

    @torch.no_grad()
    def factors(self, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The factor of the loss of every response token, 0 where it is left out, [B, R]; and means over tokens.

        Rows are whole, or without any response token in ``mask``.
        """
        config, factors, log_ratio, sums = self.config, mask, selected(log_ratio, mask), dict[str, Tensor]()
        if config.rollout_is is not None:
            sums["rollout_is_mean"] = _weights(ratio_at_level(log_ratio, mask, config.rollout_is), config) * mask
            factors = sums["rollout_is_mean"] / self.mean_weight
        vetoed = ("seq_min_k1", config.rollout_token_veto_threshold or 0.0, inf)
        is_out = sums["rollout_rs_masked_fraction"] = _is_rejected(log_ratio, mask, [*config.rejections, vetoed])
        means = {PREFIX + name: float(each.sum() / mask.sum().clamp(min=1)) for name, each in sums.items()}
        return factors * ~is_out, means


def corrected(
    data: DataProto, config: RolloutCorrectionSection, groups: ProcessGroups, device: torch.device
) -> tuple[DataProto, dict[str, float]]:
    """``data`` with ``rollout_is_weights`` (where requested) and ``kept_mask`` [B, R], and metrics of the whole batch.

    Collective over the data-parallel ranks of the last stage. Rows are whole there, on every context-parallel rank, so
    that no level depends on how they are packed. Computed on the host: fp64 sums of a few numbers per token. ``device``
    is where collectives expect tensors.

    Raises:
        ValueError: old or rollout log-probs are missing.
    """
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    missing = [name for name in names if name not in data.batch]
    if missing:
        raise ValueError(f"algorithm.rollout_correction: the batch has no {' and no '.join(missing)}")

    def over_ranks(sums: Tensor) -> Tensor:
        return reduce_over(sums, groups.dp, dist.ReduceOp.SUM, device)

    old, rollout, mask = (data.batch[name] for name in names)
    weights, kept, metrics = corrections(old, rollout, mask, config, over_ranks)
    columns = dict(data.batch.items()) | {"kept_mask": kept}
    if weights is not None:
        columns["rollout_is_weights"] = weights
    return DataProto.from_dict(columns, data.non_tensor_batch, data.meta_info), metrics


def compute_rollout_correction_weights(
    log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionSection, over_ranks: OverRanks
) -> tuple[Tensor, dict[str, float]]:
    """The weight of every response token from the r of ``rollout_is``'s level, and how they spread.

    With ``rollout_is_batch_normalize`` divided by their mean: over tokens, or at other levels over sequences.
    ``rollout_is_eff_sample_size`` is (sum w)^2 / (n sum w^2) over the same.
    """
    level, upper = str(config.rollout_is), bounds_of(config.rollout_is_threshold)[0][-1]
    ratio = ratio_at_level(log_ratio, mask, level)
    weights = _weights(ratio, config) * mask
    # Each sequence once where all its tokens share a weight, so that long ones do not count more.
    once = mask if level == "token" else _first_tokens(mask)
    w, r = (weights * once).double(), (ratio * once).double()
    is_cut = (ratio > upper) * once
    sums = torch.stack([once.double().sum(), w.sum(), w.square().sum(), r.sum(), is_cut.double().sum()])
    count, total, squares, raw, cut = over_ranks(sums).tolist()
    count = max(count, 1.0)
    mean = total / count
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": max(squares / count - mean**2, 0.0) ** 0.5,
        "rollout_is_eff_sample_size": total**2 / (count * squares) if squares > 0 else 1.0,
        "rollout_is_ratio_mean": raw / count,
        "rollout_is_ratio_fraction_high": cut / count,
    }
    if config.rollout_is_batch_normalize and mean > 0:
        weights = weights / mean
    return weights, {PREFIX + name: value for name, value in metrics.items()}


def compute_rollout_rejection_mask(
    log_ratio: Tensor, mask: Tensor, config: RolloutCorrectionSection, over_ranks: OverRanks
) -> tuple[Tensor, dict[str, float]]:
    """1 on response tokens for which every statistic of ``rollout_rs`` is within its bounds."""
    is_out = _is_rejected(log_ratio, mask, config.rejections)
    metrics = _shares(is_out, mask, over_ranks, "rollout_rs_seq_masked_fraction", "rollout_rs_masked_fraction")
    return mask * (~is_out).to(mask.dtype), metrics


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, over_ranks: OverRanks = one_rank
) -> dict[str, float]:
    """How far apart the two policies are, over the tokens or sequences of the batch.

    d = rollout - old log-prob, tokens drawn from the rollout: ``kl`` is the mean of d, KL(rollout || old), ``k3_kl``
    that of exp(-d) + d - 1. A sequence's perplexity is exp(-mean log-prob), ``ppl_ratio`` the mean over sequences of
    training's over the rollout's. ``chi2_token`` and ``chi2_seq`` are mean(r^2) - 1 of tokens and of sequences.
    """
    mask = response_mask.double()
    old, rollout = (selected(each.double(), mask) for each in (old_log_prob, rollout_log_prob))
    log_ratio = old - rollout
    ratio, lengths = _ratio(log_ratio), mask.sum(-1)
    has_tokens = (lengths > 0).double()
    lengths = lengths.clamp(min=1)
    ppl_old, ppl_rollout = -old.sum(-1) / lengths, -rollout.sum(-1) / lengths
    gap = ppl_old - ppl_rollout
    of_tokens = [mask, -log_ratio, (ratio - log_ratio - 1) * mask, (ratio.square() - 1) * mask]
    of_rows = [
        has_tokens,
        ppl_old.exp() * has_tokens,
        ppl_rollout.exp() * has_tokens,
        gap,
        gap.abs(),
        gap.exp() * has_tokens,
        (_ratio(2 * log_ratio.sum(-1)) - 1) * has_tokens,
    ]
    sums = over_ranks(torch.stack([values.sum() for values in (*of_tokens, *of_rows)])).tolist()
    tokens, rows = max(sums[0], 1.0), max(sums[4], 1.0)
    names = (
        *("kl", "k3_kl", "chi2_token"),
        *("training_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq"),
    )
    means = [total / tokens for total in sums[1:4]] + [total / rows for total in sums[5:]]
    return {PREFIX + name: value for name, value in zip(names, means, strict=True)}


def ratio_at_level(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """exp of the log-ratio of a token's token, sequence, or sequence's mean, [B, R]; what is masked is not read."""
    return _ratio(_over(selected(log_ratio, mask), mask, OF_LEVEL[level].removesuffix("_k1")))


def _weights(ratio: Tensor, config: RolloutCorrectionSection) -> Tensor:
    *lower, upper = bounds_of(config.rollout_is_threshold)[0]
    if not lower:
        return torch.clamp(ratio, max=upper)
    return torch.where((ratio >= lower[0]) & (ratio <= upper), ratio, 0.0)


def _is_rejected(log_ratio: Tensor, mask: Tensor, rejections: Sequence[tuple[str, float, float]]) -> Tensor:
    """Response tokens of which one of the statistics is out of its bounds, bool [B, R]."""
    is_out = torch.zeros_like(mask, dtype=torch.bool)
    for name, lower, upper in rejections:
        scope, _, estimator = name.rpartition("_")
        each = {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": _ratio(log_ratio) - 1 - log_ratio}[estimator]
        value = _over(each, mask, scope)
        value = _ratio(value) if estimator == "k1" else value
        is_out |= (value < lower) | (value > upper)
    return is_out & (mask > 0)


def _over(values: Tensor, mask: Tensor, scope: str) -> Tensor:
    """Each token's value, or the sum, mean, least or largest one of its sequence, where 0 is among them, [B, R]."""
    values = values * mask
    if scope == "token":
        return values
    sums = values.sum(-1, keepdim=True)
    of_rows = {
        "seq_sum": sums,
        "seq_mean": sums / mask.sum(-1, keepdim=True).clamp(min=1),
        "seq_min": values.amin(-1, keepdim=True),
        "seq_max": values.amax(-1, keepdim=True),
    }
    return of_rows[scope].expand_as(values)


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.clamp(log_ratio, min=-SAFETY_BOUND, max=SAFETY_BOUND).exp()


def _first_tokens(mask: Tensor) -> Tensor:
    """1 on the first response token of every row that has one."""
    return mask * (mask.cumsum(-1) == 1).to(mask.dtype)


def _shares(is_out: Tensor, mask: Tensor, over_ranks: OverRanks, of_rows: str, of_tokens: str) -> dict[str, float]:
    """The share of sequences with any such token, and that of such tokens."""
    counts = [is_out.any(-1), mask.amax(-1), is_out, mask]
    rows_out, rows, out, tokens = over_ranks(torch.stack([count.double().sum() for count in counts])).tolist()
    return {PREFIX + of_rows: rows_out / max(rows, 1.0), PREFIX + of_tokens: out / max(tokens, 1.0)}
