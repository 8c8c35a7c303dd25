"""The training ops of NVIDIA GPUs: library calls where torch has them, Triton kernels of ours for the rest."""

from megatron.core.ops.cuda.table import cuda_ops

__all__ = ["cuda_ops"]
