"""The table of policy losses, and the two forms that one can have.

Every entry has upstream's form: rows [B, R] in, a scalar and metrics out. Most losses that come with the trainer are
sums over tokens (at most with a mean per sequence), and their entries are made of a function of tokens. The engine
calls that one on packed tokens, so that the gradient does not depend on how a mini-batch is cut. Any other entry gets
the rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.aggregation import agg_loss
from verl.utils.masks import selected
from verl.utils.registry import Registry
from verl.workers.config import ActorConfig

# (old_log_prob, log_prob, advantages, response_mask: [B, R], loss_agg_mode, config of the actor, rollout_is_weights:
# [B, R] or None) -> (scalar loss, metrics)
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
# Per token: the mean of the values over all response tokens of the token's sequence, wherever they lie. It is
# detached, and collective over context-parallel ranks: a loss calls it always or never, whatever tokens it has.
SequenceMean = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TokenLosses:
    """A loss of every token, and what its clipping did; all of one shape.

    Attributes:
        loss: what the aggregation weighs and adds up.
        is_clipped: true where clipping changed the loss (``actor/pg_clipfrac``).
        is_clipped_lower: true where the lower bound of the dual clip did (``actor/pg_clipfrac_lower``).
        approx_kl: old less new log-prob, detached, as far as the loss looks (``actor/ppo_kl``).
    """

    loss: Tensor
    is_clipped: Tensor
    is_clipped_lower: Tensor
    approx_kl: Tensor


# (old_log_prob, log_prob, advantages, config of the actor, sequence_mean); the tensors have one shape, often [S].
TokenLossFn = Callable[[Tensor, Tensor, Tensor, ActorConfig, SequenceMean], TokenLosses]

LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode", "policy loss")


@dataclass(frozen=True)
class TokenForm:
    """How the engine computes a registered loss on packed tokens.

    Attributes:
        losses: the function of tokens.
        loss_agg_mode: the aggregation that the loss is defined with; None: the one of the config.
    """

    losses: TokenLossFn
    loss_agg_mode: str | None = None


_TOKEN_FORMS: dict[PolicyLossFn, TokenForm] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a loss available as ``actor.policy_loss.loss_mode=name``."""
    return LOSSES.register(name)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss registered as ``name``; ValueError lists the known ones."""
    return LOSSES.get(name)


def loss_of_tokens(
    name: str, *, default_agg_mode: str = "token-mean", own_agg_mode: str | None = None
) -> Callable[[TokenLossFn], PolicyLossFn]:
    """Decorator that makes a loss of tokens available as ``actor.policy_loss.loss_mode=name``, in upstream's form.

    The name of the decorated function is that form: rows [B, R] in, the aggregated loss and its metrics out.

    Args:
        default_agg_mode: the aggregation of a call that names none.
        own_agg_mode: the aggregation that the loss is defined with, whatever a call or the config names.
    """

    def decorate(losses: TokenLossFn) -> PolicyLossFn:
        def of_rows(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_agg_mode,
            config: ActorConfig | None = None,
            rollout_is_weights: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, Any]]:
            mask = response_mask.to(log_prob.dtype)
            found = _losses_of_rows(losses, old_log_prob, log_prob, advantages, mask, config)
            loss = found.loss if rollout_is_weights is None else found.loss * selected(rollout_is_weights, mask)
            num_tokens = mask.sum().clamp(min=1)
            metrics = {
                "actor/pg_clipfrac": float((found.is_clipped * mask).sum() / num_tokens),
                "actor/ppo_kl": float((found.approx_kl * mask).sum() / num_tokens),
                "actor/pg_clipfrac_lower": float((found.is_clipped_lower * mask).sum() / num_tokens),
            }
            return agg_loss(loss, mask, own_agg_mode or loss_agg_mode), metrics

        of_rows.__name__, of_rows.__module__, of_rows.__doc__ = losses.__name__, losses.__module__, losses.__doc__
        _TOKEN_FORMS[of_rows] = TokenForm(losses, own_agg_mode)
        return register_policy_loss(name)(of_rows)

    return decorate


def token_form(function: PolicyLossFn) -> TokenForm | None:
    """The form on packed tokens; None for a loss that needs rows."""
    return _TOKEN_FORMS.get(function)


def _losses_of_rows(
    losses: TokenLossFn,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig | None,
) -> TokenLosses:
    old_log_prob, log_prob, advantages = (selected(each, mask) for each in (old_log_prob, log_prob, advantages))
    count = mask.sum(-1, keepdim=True).clamp(min=1)

    def sequence_mean(values: Tensor) -> Tensor:
        return ((values.detach() * mask).sum(-1, keepdim=True) / count).expand_as(values)

    return losses(old_log_prob, log_prob, advantages, config or ActorConfig(), sequence_mean)


def clamped_log_ratio(old_log_prob: Tensor, log_prob: Tensor, largest: float = 20.0) -> Tensor:
    """log_prob - old_log_prob within +-``largest``, so that one token cannot overflow the sum."""
    return torch.clamp(log_prob - old_log_prob, min=-largest, max=largest)
