"""The policy's part of the loss of a packed micro-batch, from a loss of tokens or from one in upstream's form.

Both are called with (old log-probs [S], log-probs [S] of the policy, inputs [S], the micro-batch) and return a
``PolicyTerm``; both are collective over the context-parallel ranks, which share the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.trainer.ppo.aggregation import share_of_mini_batch
from verl.trainer.ppo.policy_losses import SequenceMean, TokenForm, get_policy_loss_fn, token_form
from verl.utils.masks import finite_outside, selected
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.utils.megatron.reduce import reduce_over
from verl.workers.actor.loss_inputs import LossInputs, TokenInputs
from verl.workers.actor.update_metrics import TokenSums, sum_dtype
from verl.workers.config import ActorConfig

# Metrics that a loss of rows may report, and the sums that they are means of.
_METRICS_OF_ROWS = {
    "actor/pg_clipfrac": "clipfrac",
    "actor/pg_clipfrac_lower": "clipfrac_lower",
    "actor/ppo_kl": "approx_kl",
}


@dataclass(frozen=True)
class PolicyTerm:
    """What the policy adds to the loss of a mini-batch.

    Attributes:
        loss: the scalar, with the gradient of the tokens of this rank.
        sums: its sums over tokens.
        metrics: what the loss itself reports, by name; None where it can report nothing.
    """

    loss: Tensor
    sums: TokenSums
    metrics: Mapping[str, float] | None = None


# (old log-probs [S], log-probs [S], inputs [S], the micro-batch) -> its part of the loss
PolicyTermFn = Callable[[Tensor, Tensor, TokenInputs, PackedMicroBatch], PolicyTerm]


def policy_term(config: ActorConfig, inputs: LossInputs, cp_group: dist.ProcessGroup | None) -> PolicyTermFn:
    """The term of ``policy_loss.loss_mode`` for a mini-batch; ``cp_group``: the ranks that share each sequence."""
    form = token_form(get_policy_loss_fn(config.policy_loss.loss_mode))
    if form is None:
        return LossOfRows(config, inputs, cp_group)
    return LossOfTokens(form, config, inputs, cp_group)


@dataclass(frozen=True)
class LossOfTokens:
    """sum_t w_t u_t pg_t with u_t = 1 without a rollout correction, however the mini-batch was packed.

    A correction in the loss takes u_t from whole rows, which context-parallel ranks share.
    """

    form: TokenForm
    config: ActorConfig
    inputs: LossInputs
    cp_group: dist.ProcessGroup | None

    def __call__(self, old_S: Tensor, log_probs_S: Tensor, tokens: TokenInputs, micro: PackedMicroBatch) -> PolicyTerm:
        log_probs_S = finite_outside(log_probs_S, tokens.weights)
        policy = self.form.losses(old_S, log_probs_S, tokens.advantages, self.config, self._sequence_mean(micro))
        weights_S = tokens.weights if tokens.policy_weights is None else tokens.policy_weights
        weighted_S = weights_S * policy.loss
        if tokens.rollout_is_weights is not None:
            weighted_S = weighted_S * tokens.rollout_is_weights
        correction, metrics = self.inputs.correction, None
        if correction is not None:
            log_ratio_S = selected(log_probs_S.detach() - old_S, tokens.weights)
            found, (rows_S, cols_S) = _rows(log_ratio_S, micro, self.inputs, self.cp_group), micro.places_2S
            factors_BR, metrics = correction.factors(*found)
            weighted_S = weighted_S * factors_BR[rows_S, cols_S]
        sums = TokenSums(
            pg_loss=weighted_S.detach().to(sum_dtype(weighted_S.device)).sum(),
            clipfrac=policy.is_clipped.float().sum(),
            clipfrac_lower=policy.is_clipped_lower.float().sum(),
            approx_kl=policy.approx_kl.sum(),
        )
        return PolicyTerm(weighted_S.sum(), sums, metrics)

    def _sequence_mean(self, micro: PackedMicroBatch) -> SequenceMean:
        """The mean over each row of ``micro``; context-parallel ranks share its tokens, micro-batches do not."""
        rows_S, cols_S = micro.places_2S

        def mean(values_S: Tensor) -> Tensor:
            rows_BR = values_S.new_zeros(self.inputs.weights.shape)
            rows_BR[rows_S, cols_S] = values_S.detach()
            sums_B = _summed(rows_BR.sum(-1), micro, self.cp_group)
            return (sums_B / self.inputs.response_lengths.clamp(min=1).to(values_S.device))[rows_S]

        return mean


@dataclass(frozen=True)
class LossOfRows:
    """A loss in upstream's form, called with the rows of the micro-batch that have response tokens.

    A loss says how the rows of a micro-batch count against each other. Against other micro-batches they count as
    ``loss_agg_mode`` says: by their tokens or their sequences. Of context-parallel ranks each gets whole rows, whose
    log-probs have a gradient where the rank computed them.
    """

    config: ActorConfig
    inputs: LossInputs
    cp_group: dist.ProcessGroup | None

    def __call__(self, old_S: Tensor, log_probs_S: Tensor, tokens: TokenInputs, micro: PackedMicroBatch) -> PolicyTerm:
        """ValueError: the loss returns something else than a scalar and metrics."""
        inputs, config = self.inputs, self.config
        rows_S, cols_S = micro.places_2S
        found = _rows(log_probs_S.detach(), micro, inputs, self.cp_group)
        approx_kl = (old_S - log_probs_S.detach()).sum()
        rows = found[1].amax(-1) > 0
        if not rows.any():
            loss = log_probs_S.sum()
            return PolicyTerm(loss, TokenSums(pg_loss=loss.detach(), approx_kl=approx_kl), {})
        mask = found[1][rows] * (inputs.weights.to(log_probs_S.device)[rows] > 0)

        def chosen(values_BR: Tensor) -> Tensor:
            return finite_outside(values_BR.to(log_probs_S.device)[rows], mask)

        old = chosen(found[0] if inputs.old_log_probs is None else inputs.old_log_probs)
        weights = None if inputs.rollout_is_weights is None else chosen(inputs.rollout_is_weights)
        corrected = dict[str, float]()
        if inputs.correction is not None:
            weights, corrected = inputs.correction.factors(chosen(found[0]) - old, mask)
        result: Any = get_policy_loss_fn(config.policy_loss.loss_mode)(
            old_log_prob=old,
            log_prob=finite_outside(found[0].index_put((rows_S, cols_S), log_probs_S)[rows], mask),
            advantages=chosen(inputs.advantages),
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=weights,
        )
        loss, metrics = _checked(result, config.policy_loss.loss_mode)
        share = share_of_mini_batch(
            mask, config.loss_agg_mode, num_tokens=inputs.num_kept_tokens, num_sequences=inputs.num_sequences
        )
        # The ranks that share the sequences have the same loss, and add their shares of it up.
        pg_loss = share * loss.detach() / (1 if self.cp_group is None else self.cp_group.size())
        totals = {
            key: log_probs_S.new_tensor(metrics.pop(name) * log_probs_S.numel())
            for name, key in _METRICS_OF_ROWS.items()
            if name in metrics
        }
        return PolicyTerm(
            share * loss, TokenSums(**({"pg_loss": pg_loss, "approx_kl": approx_kl} | totals)), metrics | corrected
        )


def _rows(values_S: Tensor, micro: PackedMicroBatch, inputs: LossInputs, cp_group: dist.ProcessGroup | None) -> Tensor:
    """The values of the scored tokens, and 1 where there are any, on every context-parallel rank, [2, B, R]."""
    rows_S, cols_S = micro.places_2S
    found = values_S.new_zeros(2, *inputs.weights.shape)
    found[0, rows_S, cols_S] = values_S
    found[1, rows_S, cols_S] = 1.0
    return _summed(found.transpose(0, 1), micro, cp_group).transpose(0, 1)


def _summed(values_B: Tensor, micro: PackedMicroBatch, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Sums over the context-parallel ranks of the values [B, ...]; only the micro-batch's rows travel."""
    if cp_group is None or len(micro.members_M) == 0:
        return values_B
    sums_M = reduce_over(values_B[micro.members_M], cp_group, dist.ReduceOp.SUM, values_B.device)
    return values_B.index_copy(0, micro.members_M, sums_M)


def _checked(result: Any, name: str) -> tuple[Tensor, dict[str, float]]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        raise ValueError(f"the policy loss {name!r} returned a {type(result).__name__}; expected (scalar, metrics)")
    loss, metrics = result
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise ValueError(f"the policy loss {name!r} returned no scalar tensor as its first value")
    return loss.reshape(()), {key: float(torch.as_tensor(value).float().mean()) for key, value in metrics.items()}
