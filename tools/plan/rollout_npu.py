"""The rollout ops of Ascend as shapes: what `vllm_ascend.ops` allocates around torch_npu's kernels, and no values.

Every entry follows the file of its name there, call by call; a kernel's outputs are made, its workspace is not known.
What is plain torch there is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.plan.launches import launched
from tools.plan.train_npu import STATISTICS_WIDTH
from vllm.ops import reference_moe
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
    run_at_once,
)
from vllm.ops.reference_sample import left_out, sample_with
from vllm_ascend.ops import rollout_ops as ascend_ops
from vllm_ascend.ops.kv_layout import read_blocks, read_tokens
from vllm_ascend.ops.packed_context import CausalAttention, context_slots
from vllm_ascend.ops.sample import MAX_TOP_K

INFO_WIDTH = 128  # int32 that npu_moe_distribute_dispatch_v2 returns for each row, for its way back
PAGED_SIZES = (512, 64)  # latent, rope that the paged kernel and the one that writes the cache take
MIN_PAGED_HEAD, MAX_PAGED_HEAD = 16, 512

COUNTING = 5  # launches that count the rows of each expert, and of all
SLOTS = 15  # launches that compute the slots of a prefill's whole context, once for all layers
CASTS = 2  # of cos and sin
SCATTERED_PARTS = 2  # of the cache: latent and rope, or keys and values

OnExchange = Callable[[str], None]  # gets the kernel


def npu_ops() -> RolloutOps:
    """The run's table with shapes for kernels; the planner replaces its exchange of experts and its routing."""
    return replace(
        ascend_ops(),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary_interleaved=rotary_interleaved,
        norm_rope_write_kv=norm_rope_write_kv,
        mla_decode=mla_decode,
        mla_prefill=partial(mla_prefill, CausalAttention()),
        rope_write_gqa=rope_write_gqa,
        gqa_decode=gqa_decode,
        gqa_prefill=partial(gqa_prefill, CausalAttention()),
        topk_router=topk_router,
        fused_experts=fused_experts,
        silu_and_mul=silu_and_mul,
        sample=sample,
        run_beside=run_at_once,
    )


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    launched()
    x_TH.new_empty(*x_TH.shape[:-1], 1, dtype=torch.float32)  # the kernel returns the divisors too
    return torch.empty_like(x_TH, memory_format=torch.contiguous_format)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return rms_norm(x_TH, weight_H, eps), torch.empty_like(x_TH)


def rotary_interleaved(x_TNR: Tensor, angles: Angles) -> Tensor:
    kept = [part_TR.to(x_TNR.dtype) for part_TR in angles]
    dense = x_TNR.contiguous()
    launched()
    del kept
    return torch.empty_like(dense)


def norm_rope_write_kv(
    cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
) -> None:
    latent = len(weight_L)
    if kv_TD.dtype == torch.float32 or (latent, kv_TD.shape[1] - latent) != PAGED_SIZES:
        launched(SCATTERED_PARTS)
        turned = rotary_interleaved(kv_TD[:, None, latent:], angles)
        rms_norm(kv_TD[:, :latent], weight_L, eps)
        del turned
        return
    launched()
    kept = kv_TD.contiguous(), *(part_TR.to(kv_TD.dtype) for part_TR in angles)
    del kept


def mla_decode(q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    q_latent_BNL, q_rope_BNR = q
    sizes = (q_latent_BNL.shape[-1], q_rope_BNR.shape[-1])
    if q_latent_BNL.dtype != torch.float32 and sizes == PAGED_SIZES:
        queries = q_latent_BNL.contiguous(), q_rope_BNR.contiguous()
        launched()
        return torch.empty_like(queries[0])
    q_BND = torch.cat(q, dim=-1)
    kv_SD = torch.cat([read_blocks(pages, meta.block_tables.flatten().long()) for pages in cache], dim=-1)
    out_BND = _attended(q_BND)
    del kv_SD
    return out_BND[..., : sizes[0]]


def mla_prefill(
    attention: CausalAttention, q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float
) -> Tensor:
    heads, nope = q[0].shape[1:]
    latent_SL, rope_SR = (read_tokens(pages, _context_slots(meta)) for pages in cache)
    expanded_SNC = F.linear(latent_SL, kv_b_NCL.flatten(0, 1)).unflatten(-1, (heads, -1))
    q_TND = torch.cat(q, dim=-1)
    k_SND = torch.cat((expanded_SNC[..., :nope], rope_SR.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
    v_SNV = expanded_SNC[..., nope:]
    v_SND = F.pad(v_SNV, (0, q_TND.shape[-1] - v_SNV.shape[-1]))
    attention.triangle(q_TND.device)
    out_TND = _attended(q_TND)
    del k_SND, v_SND
    return out_TND[..., : v_SNV.shape[-1]]


def rope_write_gqa(
    cache: KVCache, qkv_TMD: Tensor, bias_MD: Tensor | None, norms: HeadNorms | None, angles: Angles, slots_T: Tensor
) -> Tensor:
    kv_heads, size = cache[0].shape[2] // qkv_TMD.shape[2], qkv_TMD.shape[2]
    if bias_MD is not None:
        qkv_TMD = torch.empty_like(qkv_TMD)
    q_TND, k_TGD, v_TGD = qkv_TMD.tensor_split((-2 * kv_heads, -kv_heads), dim=1)
    if norms is not None:
        q_TND = rms_norm(q_TND.reshape(-1, size), norms.q_weight_D, norms.eps).view(q_TND.shape)
        k_TGD = rms_norm(k_TGD.reshape(-1, size), norms.k_weight_D, norms.eps).view(k_TGD.shape)
    turned = [_turned(x_TND, angles[0].shape[1]) for x_TND in (q_TND, k_TGD)]
    v_TGD.contiguous()
    launched(CASTS + 2 + SCATTERED_PARTS + (bias_MD is not None))
    return turned[0]


def _turned(x_TND: Tensor, width: int) -> Tensor:
    turned, kept = x_TND.tensor_split((width,), dim=-1)
    turned = torch.empty_like(turned.contiguous())
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def gqa_decode(q_BND: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
    size = q_BND.shape[2]
    if q_BND.dtype != torch.float32 and size % MIN_PAGED_HEAD == 0 and size <= MAX_PAGED_HEAD:
        launched()
        return torch.empty_like(q_BND)
    gathered = [read_blocks(pages, meta.block_tables.flatten().long()).contiguous() for pages in cache]
    out_BND = _attended(q_BND)
    del gathered
    return out_BND


def gqa_prefill(
    attention: CausalAttention, q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float
) -> Tensor:
    gathered = [read_tokens(pages, _context_slots(meta)) for pages in cache]
    attention.triangle(q_TND.device)
    out_TND = _attended(q_TND)
    del gathered
    return out_TND


def topk_router(logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
    if routing.scoring != "sigmoid":
        return reference_moe.topk_router(logits_TE, bias_E, routing)
    launched()
    weights_TK = logits_TE.new_empty(len(logits_TE), routing.top_k)
    ids_TK = logits_TE.new_empty(len(logits_TE), routing.top_k, dtype=torch.int32).long()
    return (weights_TK if routing.normalize else logits_TE.gather(1, ids_TK).sigmoid() * routing.scaling), ids_TK


def fused_experts(x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
    """The rows of all choices are allocated, those of other ranks' experts too."""
    w13_E2FH, w2_EHF = matrices
    weights_TK, ids_TK = choices
    if len(x_TH) == 0:
        return torch.zeros_like(x_TH)
    ids_TK = torch.empty_like(ids_TK, device=x_TH.device)
    local_TK = ids_TK - first_expert
    is_elsewhere_TK = (local_TK < 0) | (local_TK >= len(w13_E2FH))
    local_TK = local_TK.masked_fill(is_elsewhere_TK, len(w13_E2FH))
    num_rows = ids_TK.numel()
    launched(COUNTING + 2)  # one sorts the rows, one adds them up
    rows_SH, row_map_S = x_TH.new_empty(num_rows, x_TH.shape[1]), x_TH.new_empty(num_rows, dtype=torch.int32)
    hidden_SF = silu_and_mul(_product(rows_SH, w13_E2FH))
    out_SH = _product(hidden_SF, w2_EHF)
    out_SH = out_SH.masked_fill((torch.arange(num_rows, device=x_TH.device) >= 0).unsqueeze(1), 0)
    weights_TK = weights_TK.masked_fill(is_elsewhere_TK, 0.0)
    del rows_SH, hidden_SF, row_map_S, local_TK
    return torch.empty_like(x_TH)


def kernel_exchanged_experts(
    x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, num_ranks: int, on_exchange: OnExchange
) -> Tensor:
    """The experts by the dispatch and combine kernels; `on_exchange` gets the kernel."""
    w13_E2FH, w2_EHF = matrices
    weights_TK, ids_TK = choices
    weights_TK, ids_TK = weights_TK.float(), torch.empty_like(ids_TK, dtype=torch.int32, device=x_TH.device)
    capacity = len(x_TH) * num_ranks * min(len(w13_E2FH), ids_TK.shape[1])
    rows_AH = x_TH.new_empty(capacity, x_TH.shape[1])
    info = x_TH.new_empty(capacity * INFO_WIDTH, dtype=torch.int32)
    launched(3)  # the choices as int32, dispatch and combine
    on_exchange("dispatch")
    done_AH = _product(silu_and_mul(_product(rows_AH, w13_E2FH)), w2_EHF)
    on_exchange("combine")
    combined_TH = torch.empty_like(x_TH)
    del rows_AH, info, done_AH
    return combined_TH.masked_fill(torch.empty_like(x_TH[:, :1], dtype=torch.bool), 0)  # the mask is the step's


def silu_and_mul(x_T2F: Tensor) -> Tensor:
    launched()
    return x_T2F.new_empty(*x_T2F.shape[:-1], x_T2F.shape[-1] // 2)


def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
    return sample_with(logits_BW, batch, _left_out)


def _left_out(scaled_BW: Tensor, batch: SamplingBatch) -> Tensor:
    if batch.top_k_B is None or batch.max_top_k > MAX_TOP_K:
        return left_out(scaled_BW, batch)
    launched()
    return torch.empty_like(scaled_BW) == float("-inf")


def _attended(q: Tensor) -> Tensor:
    launched()
    statistics = [q.new_empty(*q.shape[:2], STATISTICS_WIDTH, dtype=torch.float32) for _ in range(2)]
    out = torch.empty_like(q)
    del statistics
    return out


def _product(rows_SI: Tensor, weight_EOI: Tensor) -> Tensor:
    launched()
    return rows_SI.new_empty(len(rows_SI), weight_EOI.shape[1])


def _context_slots(meta: PrefillMetadata) -> Tensor:
    if "context_slots" not in meta.scratch:
        launched(SLOTS)
        num_tokens = int(np.sum(meta.seq_lens_host))
        meta.scratch["context_slots"] = torch.empty(num_tokens, dtype=torch.int64, device=meta.seq_lens.device)
    return context_slots(meta)
