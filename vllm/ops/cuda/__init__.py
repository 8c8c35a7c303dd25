"""The op table of NVIDIA devices, in Triton and torch's own ops."""

from vllm.ops.cuda.table import deep_gemm_ops, rollout_ops

__all__ = ["deep_gemm_ops", "rollout_ops"]
