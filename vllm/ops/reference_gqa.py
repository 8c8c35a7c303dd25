"""Reference grouped-query attention over a paged cache of keys and values: gather each sequence's pages, padded, then
batched matrix products, in the groups of like lengths of reference_attention.py.

Letters: G heads of keys and values, M = N / G query heads that share one, D channels of a head, S padded context
length, Q padded query length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Angles, DecodeMetadata, HeadNorms, KVCache, PrefillMetadata
from vllm.ops.reference_attention import DecodeGroup, plan_decode, plan_prefill
from vllm.ops.reference_norm import rms_norm


def new_gqa_cache(
    num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    return (torch.zeros(num_blocks, block_size, 2, heads, head_dim, dtype=dtype, device=device),)


def rope_write_gqa(
    cache: KVCache, qkv_TMD: Tensor, bias_MD: Tensor | None, norms: HeadNorms | None, angles: Angles, slots_T: Tensor
) -> Tensor:
    (pages,) = cache
    kv_heads = pages.shape[3]
    if bias_MD is not None:
        qkv_TMD = qkv_TMD + bias_MD
    q_TND, k_TGD, v_TGD = qkv_TMD.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        q_TND, k_TGD = rms_norm(q_TND, norms.q_weight_D, norms.eps), rms_norm(k_TGD, norms.k_weight_D, norms.eps)
    k_TGD = rotary_half(k_TGD, angles)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots_T, torch.stack((k_TGD, v_TGD), dim=1))
    return rotary_half(q_TND, angles)


def rotary_half(x_TND: Tensor, angles: Angles) -> Tensor:
    """Channels (i, i + R/2) turned by angle i; those from R on stay."""
    cos_TR, sin_TR = angles
    turned, kept = x_TND.tensor_split((cos_TR.shape[1],), dim=-1)
    first, second = turned.float().chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1) * sin_TR[:, None]
    rotated = rotated.add_(turned * cos_TR[:, None]).to(x_TND.dtype)
    return torch.cat((rotated, kept), dim=-1) if kept.shape[-1] else rotated


def gqa_decode(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    (pages,) = cache
    groups = meta.scratch.get("groups")
    if groups is None:
        groups = meta.scratch["groups"] = plan_decode(meta, pages.flatten(2))
    if len(groups) == 1:
        return _decode_group(q_BND, pages, groups[0], scale)
    out_BND = torch.empty_like(q_BND)
    for group in groups:
        out_BND[group.rows] = _decode_group(q_BND[group.rows], pages, group, scale)
    return out_BND


def _decode_group(q_bND: Tensor, pages: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    torch.index_select(pages.flatten(1), 0, group.blocks.view(-1), out=group.pages)
    k_bGSD, v_bGSD = _keys_and_values(group.pages, len(q_bND), pages)
    q_bGMD = q_bND.unflatten(1, (k_bGSD.shape[1], -1)) * scale
    scores_bGMS = torch.matmul(q_bGMD, k_bGSD.transpose(2, 3)).add_(group.mask[:, None])
    weights_bGMS = scores_bGMS.softmax(dim=-1, dtype=torch.float32).to(pages.dtype)
    return torch.matmul(weights_bGMS, v_bGSD).flatten(1, 2)


def gqa_prefill(q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
    (pages,) = cache
    groups = meta.scratch.get("groups")
    if groups is None:
        groups = meta.scratch["groups"] = plan_prefill(meta, pages)
    out_TND = torch.empty_like(q_TND)
    for group in groups:
        count, kv_heads = len(group.blocks), pages.shape[3]
        gathered = pages.flatten(1).index_select(0, group.blocks.reshape(-1))
        k_bGSD, v_bGSD = _keys_and_values(gathered, count, pages)
        q_bQGMD = (q_TND[group.tokens] * scale).view(count, -1, kv_heads, q_TND.shape[1] // kv_heads, q_TND.shape[2])
        q_bGMQD = q_bQGMD.permute(0, 2, 3, 1, 4)
        scores = torch.matmul(q_bGMQD.flatten(2, 3), k_bGSD.transpose(2, 3)).unflatten(2, q_bGMQD.shape[2:4])
        scores = scores.add_(group.mask[:, None])
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(pages.dtype)
        out_bGMQD = torch.matmul(weights.flatten(2, 3), v_bGSD).view(q_bGMQD.shape)
        group.write(out_TND, out_bGMQD.permute(0, 3, 1, 2, 4).reshape(-1, *q_TND.shape[1:]))
    return out_TND


def _keys_and_values(gathered: Tensor, count: int, pages: Tensor) -> tuple[Tensor, Tensor]:
    """[b, G, S, D] views of the gathered pages of `count` sequences."""
    kv_bS2GD = gathered.view(count, -1, *pages.shape[2:])
    return kv_bS2GD[:, :, 0].transpose(1, 2), kv_bS2GD[:, :, 1].transpose(1, 2)
