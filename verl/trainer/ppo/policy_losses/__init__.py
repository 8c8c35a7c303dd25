"""Losses of the policy on tokens, one file each, behind verl's registry."""

from verl.trainer.ppo.policy_losses import cispo, gspo, vanilla
from verl.trainer.ppo.policy_losses.registry import (
    LOSSES,
    PolicyLossFn,
    SequenceMean,
    TokenLosses,
    get_policy_loss_fn,
    register_policy_loss,
)

__all__ = [
    "LOSSES",
    "PolicyLossFn",
    "SequenceMean",
    "TokenLosses",
    "cispo",
    "get_policy_loss_fn",
    "gspo",
    "register_policy_loss",
    "vanilla",
]
