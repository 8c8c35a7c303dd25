"""Writing a token to the KV cache of latent attention, after "torch_npu.npu_kv_rmsnorm_rope_cache" of the Ascend
documentation, and the sum before a norm, after "torch_npu.npu_add_rms_norm".

Simplified: float64 inside and one rounding at the end; no quantisation, none of the modes Norm and PA_BLK_*.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats

LATENT, ROPE = 512, 64
NZ_WIDTH = 16


@reference("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    **not_simulated: Any,
) -> tuple[None, None, None, None]:
    """kv [B, 1, S, 512 + 64] -> ckv_cache at ``index`` [B S]: the normed first part; k_cache: the turned second part.

    Caches are [blocks, block size, 1, channels]; in mode PA_NZ their memory is [blocks, channels/16, block size, 16].
    """
    op = "npu_kv_rmsnorm_rope_cache"
    unused = [name for name, value in not_simulated.items() if value is not None]
    require(not unused and not is_output_kv, op, f"{unused} and is_output_kv are not simulated")
    require(cache_mode in ("PA", "PA_BNSD", "PA_NZ"), op, f"cache_mode {cache_mode!r} is not simulated")
    dtypes = {x.dtype for x in (kv, gamma, cos, sin, k_cache, ckv_cache)}
    require(len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16}, op, f"float16 or bfloat16, got {dtypes}")
    require(kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == LATENT + ROPE, op, f"kv of {tuple(kv.shape)}")
    batch, _, sequence, _ = kv.shape
    require(tuple(cos.shape) == tuple(sin.shape) == (batch, 1, sequence, ROPE), op, f"cos of {tuple(cos.shape)}")
    require(index.dtype == torch.int64 and index.shape == (batch * sequence,), op, f"index of {tuple(index.shape)}")
    require(len(index.unique()) == len(index), op, "a slot twice")
    latent, rope = kv.double().flatten(0, 2).split((LATENT, ROPE), dim=-1)
    normed = latent / (latent.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()
    cos, sin = cos.double().flatten(0, 2), sin.double().flatten(0, 2)
    apart = torch.cat((rope[:, 0::2], rope[:, 1::2]), dim=-1)
    turned = apart * cos + torch.cat((-apart[:, ROPE // 2 :], apart[:, : ROPE // 2]), dim=-1) * sin
    for cache, values in ((ckv_cache, normed), (k_cache, turned)):
        _write(cache, values.to(cache.dtype), index, cache_mode == "PA_NZ")
    return None, None, None, None


def _write(cache: Tensor, values: Tensor, index: Tensor, is_nz: bool) -> None:
    op = "npu_kv_rmsnorm_rope_cache"
    blocks, block_size, _, channels = cache.shape
    require(cache.is_contiguous() and channels == values.shape[1], op, f"a cache of {tuple(cache.shape)}")
    require(bool(((index >= 0) & (index < blocks * block_size)).all()), op, "a slot outside of the cache")
    block, offset = index // block_size, index % block_size
    if is_nz:
        fractals = cache.view(blocks, channels // NZ_WIDTH, block_size, NZ_WIDTH)
        fractals[block, :, offset] = values.unflatten(-1, (-1, NZ_WIDTH))
    else:
        cache[block, offset, 0] = values


@reference("npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """-> norm of the sum, 1/rms in float32 with the normalised dimensions kept as 1, the sum."""
    op = "npu_add_rms_norm"
    require_floats(op, x1, x2, gamma)
    require(x1.shape == x2.shape and x1.numel() > 0, op, "wants two tensors of one shape that are not empty")
    dims = tuple(range(-gamma.dim(), 0))
    total = x1.double() + x2.double()
    inverse_rms = 1 / (total.square().mean(dims, keepdim=True) + epsilon).sqrt()
    return (total * inverse_rms * gamma.double()).to(x1.dtype), inverse_rms.float(), total.to(x1.dtype)
