"""Checkpoints of a whole training job: complete or absent, checked by size and digest, read back bit for bit."""

from megatron.core.dist_checkpointing.checkpoint import load_checkpoint, save_checkpoint
from megatron.core.dist_checkpointing.manifest import is_complete

__all__ = ["is_complete", "load_checkpoint", "save_checkpoint"]
