"""The op table of NVIDIA devices, in Triton and torch's own ops."""

from vllm.ops.cuda.table import rollout_ops

__all__ = ["rollout_ops"]
