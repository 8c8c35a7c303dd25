"""The plain-torch op table: the specification of every entry, and what runs where there are no kernels."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.contract import Angles, KVCache, RolloutOps
from vllm.ops.reference_attention import mla_decode, mla_prefill
from vllm.ops.reference_gqa import gqa_decode, gqa_prefill, new_gqa_cache, rope_write_gqa
from vllm.ops.reference_moe import all_to_all_experts, fused_experts, silu_and_mul, topk_router
from vllm.ops.reference_norm import add_rms_norm, rms_norm
from vllm.ops.reference_sample import sample


def new_kv_cache(
    num_blocks: int,
    block_size: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: str = "nd",
) -> KVCache:
    assert layout == "nd", layout  # the platform refuses others
    # Zeros, not empty: padded positions are masked to probability 0, and 0 * NaN would still be NaN.
    return (torch.zeros(num_blocks, block_size, latent + rope, dtype=dtype, device=device),)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI.to(weight_OI.dtype), weight_OI)


def head_linear(x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
    return torch.bmm(x_TNI.transpose(0, 1), weight_NIO).transpose(0, 1)


def rotary_interleaved(x_TNR: Tensor, angles: Angles) -> Tensor:
    cos_TR, sin_TR = angles
    # A pair is a complex number and its rotation a product: one pass over the data instead of six.
    half = x_TNR.shape[-1] // 2
    x_fp32 = x_TNR.float()
    if x_fp32.storage_offset() % 2 or any(stride % 2 for stride in x_fp32.stride()[:-1]):
        x_fp32 = x_fp32.clone(memory_format=torch.contiguous_format)  # complex views need even offsets
    rotated_TNh = torch.view_as_complex(x_fp32.unflatten(-1, (half, 2)))
    rotated_TNh = rotated_TNh * torch.complex(cos_TR[:, None, :half], sin_TR[:, None, :half])
    return torch.cat((rotated_TNh.real, rotated_TNh.imag), dim=-1).to(x_TNR.dtype)


def norm_rope_write_kv(
    cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
) -> None:
    latent = len(weight_L)
    rope_TR = rotary_interleaved(kv_TD[:, None, latent:], angles)[:, 0]
    write_kv(cache, rms_norm(kv_TD[:, :latent], weight_L, eps), rope_TR, slots_T)


def write_kv(cache: KVCache, latent_TL: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """Write finished channels to their slots."""
    (pages,) = cache
    pages.view(-1, pages.shape[-1]).index_copy_(0, slots_T, torch.cat((latent_TL, rope_TR), dim=-1))


def rollout_ops() -> RolloutOps:
    return RolloutOps(
        new_kv_cache=new_kv_cache,
        linear=linear,
        head_linear=head_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_interleaved=rotary_interleaved,
        norm_rope_write_kv=norm_rope_write_kv,
        mla_decode=mla_decode,
        mla_prefill=mla_prefill,
        new_gqa_cache=new_gqa_cache,
        rope_write_gqa=rope_write_gqa,
        gqa_decode=gqa_decode,
        gqa_prefill=gqa_prefill,
        topk_router=topk_router,
        fused_experts=fused_experts,
        exchanged_experts=partial(all_to_all_experts, experts=fused_experts),
        silu_and_mul=silu_and_mul,
        sample=sample,
        not_capturable=("mla_decode", "fused_experts", "exchanged_experts", "gqa_decode"),
        implementations=dict.fromkeys(RolloutOps.entries(), "reference"),
    )
