"""Reference sampling: edits, temperature, min-p, top-k, top-p, and a draw that depends on the row alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.ops.contract import NOT_FINITE, LogitEdits, SampledTokens, SamplingBatch
from vllm.v1.sample.rng import exponential_noise

Filter = Callable[[Tensor, SamplingBatch], Tensor]


def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
    return sample_with(logits_BW, batch, left_out)


def sample_with(logits_BW: Tensor, batch: SamplingBatch, find_left_out: Filter) -> SampledTokens:
    """`sample` with any implementation of `left_out`."""
    is_finite_B = logits_BW.isfinite().all(-1)
    edited_BW = logits_BW if batch.edits is None else edit(logits_BW, batch.edits)
    scaled_BW = _over_temperature(edited_BW, batch)
    probs_BW, drawn_total_B = _weights(scaled_BW)
    limited_BW = _limit(scaled_BW, probs_BW, batch, find_left_out)
    tokens_B = _draw(limited_BW, probs_BW, batch)
    reported_BW, log_total_B = scaled_BW, drawn_total_B
    if batch.logprobs_mode == "processed_logprobs":
        reported_BW = limited_BW
    elif batch.logprobs_mode == "raw_logprobs":
        reported_BW = logits_BW
    elif batch.edits is not None:
        reported_BW = _over_temperature(logits_BW, batch)
    if reported_BW is not scaled_BW:
        log_total_B = _weights(reported_BW)[1]
    sampled = _report(tokens_B, reported_BW, log_total_B, batch.num_top_logprobs)
    sampled.token_ids_B = torch.where(is_finite_B, tokens_B, NOT_FINITE)
    can_draw_B = is_finite_B & drawn_total_B.isfinite()
    sampled.logprobs_B = torch.where(can_draw_B, sampled.logprobs_B, float("nan"))
    return sampled


def edit(logits_BW: Tensor, edits: LogitEdits) -> Tensor:
    """A copy with bias and penalties."""
    edited_BW = logits_BW.clone(memory_format=torch.contiguous_format)
    flat = edited_BW.view(-1)
    if edits.bias_at_M is not None and edits.bias_M is not None:
        flat.index_copy_(0, edits.bias_at_M, flat[edits.bias_at_M] + edits.bias_M)
    if edits.seen_at_S is not None and edits.repetition_S is not None and edits.penalty_S is not None:
        seen_S = flat[edits.seen_at_S]
        repeated_S = torch.where(seen_S > 0, seen_S / edits.repetition_S, seen_S * edits.repetition_S)
        flat.index_copy_(0, edits.seen_at_S, repeated_S - edits.penalty_S)
    return edited_BW


def _over_temperature(logits_BW: Tensor, batch: SamplingBatch) -> Tensor:
    if not batch.has_random:
        return logits_BW
    temperature_B = batch.temperature_B
    return logits_BW / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]


def _weights(scaled_BW: Tensor) -> tuple[Tensor, Tensor]:
    """([B, W] unnormalised probabilities, [B] logs of the sums of exponents)."""
    peak_B1 = scaled_BW.amax(-1, keepdim=True)
    probs_BW = (scaled_BW - peak_B1).exp_()
    return probs_BW, probs_BW.sum(-1).log_() + peak_B1[:, 0]


def _limit(scaled_BW: Tensor, probs_BW: Tensor, batch: SamplingBatch, find_left_out: Filter) -> Tensor:
    """Set `probs_BW` to 0 where nothing may be drawn; returns `scaled_BW` with -inf there, as far as that is looked at:
    for top-k and top-p, which keep the most likely token, only with processed_logprobs.
    """
    nothing = float("-inf")
    if batch.banned_BW is not None:
        scaled_BW = scaled_BW.masked_fill(batch.banned_BW, nothing)
        probs_BW.masked_fill_(batch.banned_BW, 0.0)
    if batch.min_p_B is not None:
        is_unlikely_BW = scaled_BW < scaled_BW.amax(-1, keepdim=True) + batch.min_p_B.log()[:, None]
        scaled_BW = scaled_BW.masked_fill(is_unlikely_BW, nothing)
        probs_BW.masked_fill_(is_unlikely_BW, 0.0)
    if batch.top_k_B is not None or batch.top_p_B is not None:
        left_out_BW = find_left_out(scaled_BW, batch)
        probs_BW.masked_fill_(left_out_BW, 0.0)
        if batch.logprobs_mode == "processed_logprobs":
            scaled_BW = scaled_BW.masked_fill(left_out_BW, nothing)
    return scaled_BW


def _draw(limited_BW: Tensor, probs_BW: Tensor, batch: SamplingBatch) -> Tensor:
    """Token of each row; overwrites `probs_BW`."""
    if not batch.has_random:
        return limited_BW.argmax(-1)
    race_BW = probs_BW.div_(exponential_noise(batch.keys_B2, batch.vocab_keys_W))
    drawn_B = race_BW.argmax(-1)
    if batch.banned_BW is not None:  # all that is left may be so much less likely than the banned that it underflows
        drawn_B = torch.where(race_BW.amax(-1) > 0, drawn_B, limited_BW.argmax(-1))
    if not batch.has_greedy:
        return drawn_B
    return torch.where(batch.temperature_B > 0, drawn_B, limited_BW.argmax(-1))


def left_out(scaled_BW: Tensor, batch: SamplingBatch) -> Tensor:
    """bool [B, W]: what top-k and then top-p leave out, by scaled logits. The best token always stays."""
    top_k_B, top_p_B = batch.top_k_B, batch.top_p_B
    sorted_BW, order_BW = scaled_BW.sort(dim=-1, stable=True)
    dropped_BW = torch.zeros_like(sorted_BW, dtype=torch.bool)
    if top_k_B is not None:
        kth_B1 = sorted_BW.gather(1, (sorted_BW.shape[1] - top_k_B.long()).unsqueeze(1))
        dropped_BW |= sorted_BW < kth_B1
        sorted_BW = sorted_BW.masked_fill(dropped_BW, float("-inf"))
    if top_p_B is not None:
        up_to_BW = sorted_BW.softmax(-1).cumsum(-1)
        dropped_BW |= (up_to_BW <= (1.0 - top_p_B)[:, None]) & (top_p_B < 1.0)[:, None]
    dropped_BW[:, -1] = False
    return torch.zeros_like(dropped_BW).scatter_(1, order_BW, dropped_BW)


def _report(tokens_B: Tensor, reported_BW: Tensor, log_total_B: Tensor, num_top: int) -> SampledTokens:
    chosen_B = reported_BW.gather(1, tokens_B[:, None])
    result = SampledTokens(tokens_B, chosen_B[:, 0] - log_total_B)
    if num_top > 0:
        result.ranks_B = (reported_BW > chosen_B).sum(-1) + 1
        best = reported_BW.topk(min(num_top, reported_BW.shape[1]), dim=-1)
        result.top_logprobs_BK, result.top_ids_BK = best.values - log_total_B[:, None], best.indices
    return result
