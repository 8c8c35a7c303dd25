"""The policy update."""

from .megatron_actor import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
