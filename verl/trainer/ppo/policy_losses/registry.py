"""The table of policy losses, and what one gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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

_LOSSES: dict[str, PolicyLossFn] = {}


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator that makes a loss known as ``actor.policy_loss.loss_mode=name``; a name can be taken once."""

    def register(function: PolicyLossFn) -> PolicyLossFn:
        taken = _LOSSES.setdefault(name, function)
        if taken is not function:
            raise ValueError(f"policy loss {name!r} is registered already, by {taken.__module__}")
        return function

    return register


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss of that name; ValueError lists the known ones."""
    if name not in _LOSSES:
        raise ValueError(f"actor.policy_loss.loss_mode is {name!r}; known: {', '.join(registered_policy_losses())}")
    return _LOSSES[name]


def registered_policy_losses() -> list[str]:
    """Every known name, sorted."""
    return sorted(_LOSSES)
