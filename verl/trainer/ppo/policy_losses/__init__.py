"""Losses of the policy, one file each, behind verl's registry."""

from verl.trainer.ppo.policy_losses import cispo, covariance, geo_mean, gpg, gspo, trust_region, vanilla
from verl.trainer.ppo.policy_losses.registry import (
    LOSSES,
    PolicyLossFn,
    SequenceMean,
    TokenForm,
    get_policy_loss_fn,
    register_policy_loss,
    token_form,
)

__all__ = [
    "LOSSES",
    "PolicyLossFn",
    "SequenceMean",
    "TokenForm",
    "cispo",
    "covariance",
    "geo_mean",
    "get_policy_loss_fn",
    "gpg",
    "gspo",
    "register_policy_loss",
    "token_form",
    "trust_region",
    "vanilla",
]
