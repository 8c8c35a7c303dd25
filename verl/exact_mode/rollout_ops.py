"""Exact mode's op table for rollout: on a CPU, log-probabilities equal those of ``training_ops`` bit for bit.

A token's bits depend only on the tokens before it: not on the batch, the chunks of its prompt, preemption or cached
prefixes (see math.py). Decode attends as prefill and training do, with keys and values that each head computes from the
latents, so every step expands each sequence's whole context again, which makes it several times slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.exact_mode import math as exact_math
from verl.exact_mode.math import KEYS, QUERIES
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops import reference, reference_gqa
from vllm.ops.contract import (
    Angles,
    Choices,
    DecodeMetadata,
    ExpertMatrices,
    HeadNorms,
    KVCache,
    PrefillMetadata,
    Queries,
    RolloutOps,
    RouterSettings,
    SampledTokens,
    SamplingBatch,
)
from vllm.ops.reference_moe import all_to_all_experts
from vllm.ops.reference_sample import sample as reference_sample


def rollout_ops() -> RolloutOps:
    table = reference.rollout_ops()
    entries = {
        "new_kv_cache": _on_a_cpu(reference.new_kv_cache),
        "new_gqa_cache": _on_a_cpu(reference_gqa.new_gqa_cache),
        "linear": linear,
        "rms_norm": exact_math.rms_norm,
        "add_rms_norm": add_rms_norm,
        "rotary_interleaved": rotary_interleaved,
        "norm_rope_write_kv": norm_rope_write_kv,
        "mla_prefill": mla_prefill,
        "rope_write_gqa": rope_write_gqa,
        "gqa_decode": gqa_decode,
        "gqa_prefill": gqa_prefill,
        "topk_router": topk_router,
        "fused_experts": fused_experts,
        "exchanged_experts": exchanged_experts,
        "silu_and_mul": exact_math.swiglu,
        "sample": sample,
    }
    names = table.implementations | dict.fromkeys(entries, "exact")
    return replace(table, **entries, mla_decode=None, implementations=names)  # type: ignore[arg-type]


def _on_a_cpu(new_cache: Callable[..., KVCache]) -> Callable[..., KVCache]:
    def checked(*args: Any, **kwargs: Any) -> KVCache:
        device = inspect.signature(new_cache).bind(*args, **kwargs).arguments["device"]
        if device.type != "cpu":
            raise ValueError(
                f"rollout_ops='verl.exact_mode.rollout_ops:rollout_ops' on {device}: only a CPU has exact ops; "
                "device='cpu'"
            )
        return new_cache(*args, **kwargs)

    return checked


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return exact_math.matmul(x_TI.to(weight_OI.dtype), weight_OI.t())


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TH = x_TH + residual_TH
    return exact_math.rms_norm(sum_TH, weight_H, eps), sum_TH


def rotary_interleaved(x_TNR: Tensor, angles: Angles) -> Tensor:
    cos_TR, sin_TR = angles
    half = x_TNR.shape[-1] // 2
    return exact_math.rotary(x_TNR, cos_TR[:, :half], sin_TR[:, :half])


def norm_rope_write_kv(
    cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
) -> None:
    latent = len(weight_L)
    rope_TR = rotary_interleaved(kv_TD[:, None, latent:], angles)[:, 0]
    reference.write_kv(cache, exact_math.rms_norm(kv_TD[:, :latent], weight_L, eps), rope_TR, slots_T)


@dataclass
class _Rectangle:
    """b sequences of a step with the same number of key blocks: Q padded queries each, S padded keys."""

    tokens_bQ: Tensor  # int64, index of each query among the step's new tokens; padding repeats the last
    is_real_bQ: Tensor
    last_bQ: Tensor  # int64, position of each query: the last key that it sees
    slots_bS: Tensor  # int64, cache slot of each key; padding repeats the last


def mla_prefill(q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
    (pages,) = cache
    nope, (_, expanded, latent) = q[0].shape[-1], kv_b_NCL.shape
    kv_TD = pages.view(-1, pages.shape[-1])
    q_TND = torch.cat(q, dim=-1)
    out_TNV = q_TND.new_empty(*q_TND.shape[:2], expanded - nope)
    for part in _rectangles(meta):
        kv_SD = kv_TD[part.slots_bS.flatten()]
        heads_SNC = linear(kv_SD[:, :latent], kv_b_NCL.flatten(0, 1)).unflatten(-1, (-1, expanded))
        k_rope = kv_SD[:, None, latent:].expand(-1, heads_SNC.shape[1], -1)
        k_SND = torch.cat((heads_SNC[..., :nope], k_rope), dim=-1)
        _attend(q_TND, k_SND, heads_SNC[..., nope:], part, scale, out_TNV)
    return out_TNV


def rope_write_gqa(
    cache: KVCache, qkv_TMD: Tensor, bias_MD: Tensor | None, norms: HeadNorms | None, angles: Angles, slots_T: Tensor
) -> Tensor:
    (pages,) = cache
    kv_heads = pages.shape[3]
    if bias_MD is not None:
        qkv_TMD = qkv_TMD + bias_MD

    def turned(x_TND: Tensor) -> Tensor:
        x_TNR, kept = x_TND.tensor_split((angles[0].shape[1],), dim=-1)
        neighbours = x_TNR.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((rotary_interleaved(neighbours, angles), kept), dim=-1)

    q_TND, k_TGD, v_TGD = qkv_TMD.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        q_TND = exact_math.rms_norm(q_TND, norms.q_weight_D, norms.eps)
        k_TGD = exact_math.rms_norm(k_TGD, norms.k_weight_D, norms.eps)
    kv_T2GD = torch.stack((turned(k_TGD), v_TGD), dim=1)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots_T, kv_T2GD)
    return turned(q_TND)


def gqa_decode(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    return gqa_prefill(q_BND, cache, meta.as_prefill(), scale)


def gqa_prefill(q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
    (pages,) = cache
    kv_T2GD = pages.view(-1, *pages.shape[2:])
    repeats = q_TND.shape[1] // pages.shape[3]
    out_TND = torch.empty_like(q_TND)
    for part in _rectangles(meta):
        kv_S2ND = kv_T2GD[part.slots_bS.flatten()].repeat_interleave(repeats, dim=2)
        _attend(q_TND, kv_S2ND[:, 0], kv_S2ND[:, 1], part, scale, out_TND)
    return out_TND


def topk_router(logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
    top_k, num_groups, topk_groups, normalize, scaling, scoring = routing
    assert scoring in ("sigmoid", "softmax"), scoring
    is_sigmoid, of_chosen = scoring == "sigmoid", scoring == "softmax" and normalize
    if is_sigmoid:
        scores_TE = exact_math.sigmoid(logits_TE)
    else:  # normalised weights are the softmax over the chosen logits, which is how training computes them
        scores_TE = logits_TE if of_chosen else exact_math.softmax(logits_TE)
    best_of_group = 2 if is_sigmoid else 1
    ids_TK = exact_math.choose_experts(scores_TE, bias_E, top_k, num_groups, topk_groups, best_of_group)
    weights_TK = scores_TE.gather(1, ids_TK)
    if of_chosen:
        weights_TK = exact_math.softmax(weights_TK)
    elif normalize:
        weights_TK = weights_TK / (exact_math.in_order(weights_TK) + 1e-20)
    return weights_TK * scaling, ids_TK


def fused_experts(x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
    w13_E2FH, w2_EHF = matrices
    weights_TK, ids_TK = choices
    top_k = ids_TK.shape[1]
    experts_S = ids_TK.flatten() - first_expert
    rows_SH = x_TH.new_zeros(len(experts_S), x_TH.shape[1])
    for expert in experts_S.unique().tolist():
        if 0 <= expert < len(w13_E2FH):
            chosen_S = (experts_S == expert).nonzero()[:, 0]
            gate_up = linear(x_TH[torch.div(chosen_S, top_k, rounding_mode="floor")], w13_E2FH[expert])
            rows_SH[chosen_S] = linear(exact_math.swiglu(gate_up), w2_EHF[expert])
    return exact_math.weighted_rows(rows_SH.view(*ids_TK.shape, x_TH.shape[1]), weights_TK)


def exchanged_experts(
    x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, num_active: int, group: GroupCoordinator
) -> Tensor:
    """Send every choice as a token with one expert; the sending rank weights its rows and adds them up."""
    weights_TK, ids_TK = choices
    top_k = ids_TK.shape[1]
    rows_SH = all_to_all_experts(
        x_TH.repeat_interleave(top_k, dim=0),
        matrices,
        (weights_TK.new_ones(weights_TK.numel(), 1), ids_TK.reshape(-1, 1)),
        num_active * top_k,
        group,
        fused_experts,
    )
    return exact_math.weighted_rows(rows_SH.view(*ids_TK.shape, x_TH.shape[1]), weights_TK)


def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
    """Draw as the reference does; the log-probs that training compares with are exact, processed ones are not."""
    sampled = reference_sample(logits_BW, batch)
    if batch.logprobs_mode == "processed_logprobs":
        return sampled
    reported_BW = logits_BW
    if batch.has_random and batch.logprobs_mode == "scaled_logprobs":
        reported_BW = logits_BW / torch.where(batch.temperature_B > 0, batch.temperature_B, 1.0)[:, None]
    chosen_B = reported_BW.gather(1, sampled.token_ids_B.clamp(min=0)[:, None])[:, 0]
    logprobs_B = chosen_B - exact_math.log_sum_exp(reported_BW)
    return replace(sampled, logprobs_B=torch.where(sampled.logprobs_B.isnan(), sampled.logprobs_B, logprobs_B))


def _rectangles(meta: PrefillMetadata) -> list[_Rectangle]:
    """Return the step's sequences by the number of key blocks; the other layers find them in the step's scratch."""
    found: list[_Rectangle] | None = meta.scratch.get("rectangles")
    if found is not None:
        return found
    starts = np.cumsum(meta.query_lens_host) - meta.query_lens_host
    num_blocks = -(-meta.seq_lens_host // KEYS)
    found = []
    for count in np.unique(num_blocks):
        rows = np.flatnonzero(num_blocks == count)
        query_lens, seq_lens = meta.query_lens_host[rows, None], meta.seq_lens_host[rows, None]
        query = np.arange(-(-int(query_lens.max()) // QUERIES) * QUERIES)
        real_query = np.minimum(query, query_lens - 1)
        key = torch.from_numpy(np.minimum(np.arange(count * KEYS), seq_lens - 1))
        blocks = meta.block_tables[torch.from_numpy(rows)].long().gather(1, key // meta.block_size)
        found.append(
            _Rectangle(
                tokens_bQ=torch.from_numpy(starts[rows, None] + real_query),
                is_real_bQ=torch.from_numpy(query < query_lens),
                last_bQ=torch.from_numpy(seq_lens - query_lens + real_query),
                slots_bS=blocks * meta.block_size + key % meta.block_size,
            )
        )
    meta.scratch["rectangles"] = found
    return found


def _attend(q_TND: Tensor, k_SND: Tensor, v_SNV: Tensor, part: _Rectangle, scale: float, out_TNV: Tensor) -> None:
    """Write the outputs of the part's queries; k and v hold the padded keys of one sequence after the other."""
    k_bSND, v_bSNV = (x.unflatten(0, (len(part.tokens_bQ), -1)) for x in (k_SND, v_SNV))
    exact_math.attend_into(out_TNV, q_TND, part.tokens_bQ, part.is_real_bQ, part.last_bQ, k_bSND, v_bSNV, scale)
