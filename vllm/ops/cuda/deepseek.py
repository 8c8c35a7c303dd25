"""All of DeepSeek's libraries in one table, as its models are served: FlashMLA, DeepGEMM and DeepEP."""

from __future__ import annotations

from vllm.ops.contract import RolloutOps
from vllm.ops.cuda.deep_ep import check_deep_ep, with_deep_ep
from vllm.ops.cuda.flash_mla import find_flash_mla, with_flash_mla
from vllm.ops.cuda.table import deep_gemm_ops


def deepseek_ops() -> RolloutOps:
    """`deep_gemm_ops`, `flash_mla_ops` and `deep_ep_ops` together (provider ``vllm.ops.cuda:deepseek_ops``).

    Raises:
        ValueError: one of the libraries or something of `rollout_ops` is missing, or this machine's GPU is no Hopper.
    """
    check_deep_ep()
    return with_deep_ep(with_flash_mla(deep_gemm_ops(), find_flash_mla()))
