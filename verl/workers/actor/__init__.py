"""The policy update."""

from .base import BasePPOActor
from .megatron_actor import MegatronPPOActor

__all__ = ["BasePPOActor", "MegatronPPOActor"]
