"""The paged cache in the two parts that the attention kernel reads, and writing to it: norm of the latent, rotation of
the key's channels and write as one kernel.

Source: npu_kv_rmsnorm_rope_cache, in both torch_npu versions; it rotates as the contract does (pairs in, halves out).
Limits of that kernel: float16 or bfloat16, the weight too; latent 512, rope 64; no slot twice. Any other size, and
float32, runs the separate kernels of rms_norm, rotary and npu_scatter_nd_update_. Layouts: kv_layout.py. Tolerance:
1e-2 (bfloat16; the norm's weight is applied before the one rounding), 1e-6 (float32), relative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Angles, KVCache
from vllm_ascend.ops.kv_layout import FRACTAL, is_nz, nz_rows, page_shape
from vllm_ascend.ops.rms_norm import rms_norm
from vllm_ascend.ops.rotary import rotary_interleaved

ONE_KERNEL_SIZES = (512, 64)  # latent, rope


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "nd",
) -> KVCache:
    """See ``RolloutOps.new_kv_cache``; the latents' pages and the position channels' pages."""
    shapes = (page_shape(num_blocks, block_size, channels, layout) for channels in (latent, rope))
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)


def norm_rope_write_kv(
    cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
) -> None:
    """See ``RolloutOps.norm_rope_write_kv``."""
    import torch_npu

    latent = len(weight_L)
    if kv_TD.dtype == torch.float32 or (latent, kv_TD.shape[1] - latent) != ONE_KERNEL_SIZES:
        rope_TR = rotary_interleaved(kv_TD[:, None, latent:], angles)[:, 0]
        write_kv(cache, rms_norm(kv_TD[:, :latent], weight_L, eps), rope_TR, slots_T)
        return
    cache_mode = "PA"
    # NPU-ADAPTATION(kv-nz-one-layout): the kernel has two nz modes, by token and by block of one sequence; prefill and
    # decode write by token, or decode reads other places than prefill has written; drop when nz is the only layout.
    if is_nz(cache[0]):
        cache_mode = "PA_NZ"
    # NPU-ADAPTATION END
    # It wants one shape for both layouts, [num_blocks, block_size, 1, channels], over the memory of either.
    latent_pages, rope_pages = (
        pages.view(len(pages), -1, 1, channels) for pages, channels in zip(cache, ONE_KERNEL_SIZES, strict=True)
    )
    cos_T11R, sin_T11R = (part_TR.to(kv_TD.dtype)[:, None, None, :] for part_TR in angles)
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv_TD[:, None, None, :].contiguous(),  # [batch, 1, sequence, D] with one token in each sequence
        weight_L,
        cos_T11R,
        sin_T11R,
        slots_T,
        rope_pages,
        latent_pages,
        epsilon=eps,
        cache_mode=cache_mode,
    )


def write_kv(cache: KVCache, latent_TL: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """Write finished channels to their slots."""
    import torch_npu

    for pages, new in zip(cache, (latent_TL, rope_TR), strict=True):
        rows, width = slots_T, pages.shape[-1]
        if is_nz(pages):
            rows = nz_rows(pages, slots_T).flatten()
            assert width == FRACTAL
        torch_npu.npu_scatter_nd_update_(pages.view(-1, width), rows.unsqueeze(1), new.reshape(-1, width).contiguous())
