"""The paged cache of keys and values in two parts, and writing to it: a norm of each head, the rotation of queries and
keys, then the write, by one kernel each.

Limits: float16, bfloat16 or float32; an even head size up to 896. A part is [num_blocks, block_size, G * D], which the
attention kernel reads as it is. cos and sin are cast to the tokens' dtype. Tolerance: 1e-2 (bfloat16), 1e-6 (float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import KVCache
from vllm_ascend.ops.rms_norm import rms_norm


def new_gqa_cache(
    num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """See ``RolloutOps.new_gqa_cache``; the keys' pages and the values' pages."""
    shape = (num_blocks, block_size, heads * head_dim)
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))


def norm_rope_write_gqa(
    cache: KVCache,
    qkv_TC: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    eps: float,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """See ``RolloutOps.norm_rope_write_gqa``."""
    import torch_npu

    width, size = cache[0].shape[2], len(q_weight_D)
    q_TC, k_TC, v_TC = qkv_TC.split((qkv_TC.shape[1] - 2 * width, width, width), dim=1)
    cos, sin = cos_TD.to(qkv_TC.dtype)[None, :, None], sin_TD.to(qkv_TC.dtype)[None, :, None]
    rotated = []
    for part_TC, weight_D in ((q_TC, q_weight_D), (k_TC, k_weight_D)):
        normed_TND = rms_norm(part_TC.reshape(-1, size), weight_D, eps).view(len(qkv_TC), -1, size)
        rotated.append(torch_npu.npu_rotary_mul(normed_TND.unsqueeze(0), cos, sin, rotary_mode="half").squeeze(0))
    q_TND: Tensor = rotated[0]
    for pages, new_TC in zip(cache, (rotated[1].flatten(1), v_TC), strict=True):
        torch_npu.npu_scatter_nd_update_(pages.view(-1, width), slots_T.unsqueeze(1), new_TC.contiguous())
    return q_TND
