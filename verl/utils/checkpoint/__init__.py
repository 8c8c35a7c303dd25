"""Checkpoints of a training job."""

from .megatron_checkpoint_manager import MegatronCheckpointManager

__all__ = ["MegatronCheckpointManager"]
