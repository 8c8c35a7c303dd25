"""The table of policy losses, and what one gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from verl.utils.registry import Registry
from verl.workers.config import ActorConfig

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


# (old_log_prob, log_prob, advantages, knobs of the actor, sequence_mean); the tensors have one shape, often [S].
PolicyLossFn = Callable[[Tensor, Tensor, Tensor, ActorConfig, SequenceMean], TokenLosses]

LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode", "policy loss")

# Decorator that makes a loss available as ``actor.policy_loss.loss_mode=name``, and the loss of a name.
register_policy_loss = LOSSES.register
get_policy_loss_fn = LOSSES.get
