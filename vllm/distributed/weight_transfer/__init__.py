"""Weights from a trainer in another process: vLLM's names. ``ipc`` shares a device's memory; ``nccl`` is not there."""
