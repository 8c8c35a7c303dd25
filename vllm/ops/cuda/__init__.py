"""The op tables of NVIDIA devices: Triton and torch's own ops, and with the libraries that DeepSeek publishes."""

from vllm.ops.cuda.deep_ep import deep_ep_ops
from vllm.ops.cuda.deepseek import deepseek_ops
from vllm.ops.cuda.flash_mla import flash_mla_ops
from vllm.ops.cuda.table import deep_gemm_ops, rollout_ops

__all__ = ["deep_ep_ops", "deep_gemm_ops", "deepseek_ops", "flash_mla_ops", "rollout_ops"]
