"""The op table of a CPU and all that belongs to it: kernels in C++, graphs, memory, compressed weights."""

from vllm.ops.cpu.table import default_ops, rollout_ops, uncompressed_ops

__all__ = ["default_ops", "rollout_ops", "uncompressed_ops"]
