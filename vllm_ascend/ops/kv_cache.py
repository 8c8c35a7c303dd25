"""The paged cache in the two parts that the attention kernel reads, and writing to it.

Limits: plain (ND) layout. Latent and position channels are separate tensors, because the kernel takes them apart.
Tolerance: exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import KVCache


def new_kv_cache(
    num_blocks: int, block_size: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """See ``RolloutOps.new_kv_cache``; [num_blocks, block_size, L] and [num_blocks, block_size, R]."""
    return tuple(torch.zeros(num_blocks, block_size, size, dtype=dtype, device=device) for size in (latent, rope))


def write_kv(cache: KVCache, latent_TL: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """See ``RolloutOps.write_kv``."""
    import torch_npu

    rows_T1 = slots_T.unsqueeze(1)
    for pages, new in zip(cache, (latent_TL, rope_TR), strict=True):
        torch_npu.npu_scatter_nd_update_(pages.view(-1, pages.shape[-1]), rows_T1, new.contiguous())
