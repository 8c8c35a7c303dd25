"""The paged cache of keys and values in two parts, and writing to it: the bias, a norm of each head, the rotation of
queries and keys, then the write, by one kernel each.

Limits: float16, bfloat16 or float32; an even head size up to 896. A part is [num_blocks, block_size, G * D], which the
attention kernel reads as it is. cos and sin are cast to the tokens' dtype. Tolerance: 1e-2 (bfloat16), 1e-6 (float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Angles, HeadNorms, KVCache
from vllm_ascend.ops.rms_norm import rms_norm


def new_gqa_cache(
    num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """See ``RolloutOps.new_gqa_cache``; the keys' pages and the values' pages."""
    shape = (num_blocks, block_size, heads * head_dim)
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))


def rope_write_gqa(
    cache: KVCache, qkv_TMD: Tensor, bias_MD: Tensor | None, norms: HeadNorms | None, angles: Angles, slots_T: Tensor
) -> Tensor:
    """See ``RolloutOps.rope_write_gqa``."""
    import torch_npu

    width = cache[0].shape[2]
    kv_heads = width // qkv_TMD.shape[2]
    if bias_MD is not None:
        qkv_TMD = qkv_TMD + bias_MD
    q_TND, k_TGD, v_TGD = qkv_TMD.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        q_TND, k_TGD = _normed(q_TND, norms.q_weight_D, norms.eps), _normed(k_TGD, norms.k_weight_D, norms.eps)
    cos, sin = (part_TR.to(qkv_TMD.dtype)[None, :, None] for part_TR in angles)
    q_TND, k_TGD = _rotated(q_TND, cos, sin), _rotated(k_TGD, cos, sin)
    for pages, new_TGD in zip(cache, (k_TGD, v_TGD), strict=True):
        new_TC = new_TGD.flatten(1).contiguous()
        torch_npu.npu_scatter_nd_update_(pages.view(-1, width), slots_T.unsqueeze(1), new_TC)
    return q_TND


def _normed(x_TND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_TND.reshape(-1, len(weight_D)), weight_D, eps).view(x_TND.shape)


def _rotated(x_TND: Tensor, cos_1T1R: Tensor, sin_1T1R: Tensor) -> Tensor:
    """The first R channels turned; the kernel takes whole heads only."""
    import torch_npu

    turned_TNR, kept = x_TND.tensor_split((cos_1T1R.shape[-1],), dim=-1)
    turned_TNR = turned_TNR.contiguous().unsqueeze(0)
    turned_TNR = torch_npu.npu_rotary_mul(turned_TNR, cos_1T1R, sin_1T1R, rotary_mode="half").squeeze(0)
    return torch.cat((turned_TNR, kept), dim=-1) if kept.shape[-1] else turned_TNR
