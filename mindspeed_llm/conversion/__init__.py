"""Streaming conversion of checkpoints: outputs planned file by file, written slab by slab, journaled and verified."""
