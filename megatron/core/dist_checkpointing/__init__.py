"""Checkpoints of a whole training job: complete or absent, checked by size and digest, for any layout to load."""

from megatron.core.dist_checkpointing.common import saved_contents
from megatron.core.dist_checkpointing.loader import load_checkpoint, verify_checkpoint
from megatron.core.dist_checkpointing.manifest import is_complete
from megatron.core.dist_checkpointing.saver import CheckpointSaver
from megatron.core.dist_checkpointing.writer import restore_interrupted

__all__ = [
    "CheckpointSaver",
    "is_complete",
    "load_checkpoint",
    "restore_interrupted",
    "saved_contents",
    "verify_checkpoint",
]
