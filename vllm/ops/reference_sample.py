"""Reference sampling: temperature, top-k, top-p, and a draw that depends on the row alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.ops.contract import SampledTokens, SamplingBatch
from vllm.v1.sample.rng import exponential_noise

Filter = Callable[[Tensor, SamplingBatch], Tensor]


def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
    return sample_with(logits_BW, batch, left_out)


def sample_with(logits_BW: Tensor, batch: SamplingBatch, find_left_out: Filter) -> SampledTokens:
    """`sample` with any implementation of `left_out`."""
    scaled_BW = logits_BW
    if batch.has_random:
        temperature_B = batch.temperature_B
        scaled_BW = logits_BW / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    peak_B1 = scaled_BW.amax(-1, keepdim=True)
    probs_BW = (scaled_BW - peak_B1).exp_()
    log_total_B = probs_BW.sum(-1).log_() + peak_B1[:, 0]
    top = _top_logprobs(scaled_BW, log_total_B, batch.num_top_logprobs)
    tokens_B = _draw(scaled_BW, probs_BW, batch, find_left_out)
    chosen_B = scaled_BW.gather(1, tokens_B[:, None])
    result = SampledTokens(tokens_B, chosen_B[:, 0] - log_total_B)
    if top is not None:
        result.ranks_B = (scaled_BW > chosen_B).sum(-1) + 1
        result.top_logprobs_BK, result.top_ids_BK = top
    return result


def _draw(scaled_BW: Tensor, probs_BW: Tensor, batch: SamplingBatch, find_left_out: Filter) -> Tensor:
    """Token of each row; overwrites `probs_BW` (unnormalised probabilities)."""
    if batch.banned_BW is not None:
        scaled_BW = scaled_BW.masked_fill(batch.banned_BW, float("-inf"))
        probs_BW.masked_fill_(batch.banned_BW, 0.0)
    if not batch.has_random:
        return scaled_BW.argmax(-1)
    if batch.top_k_B is not None or batch.top_p_B is not None:
        probs_BW.masked_fill_(find_left_out(scaled_BW, batch), 0.0)
    drawn_B = probs_BW.div_(exponential_noise(batch.keys_B2, batch.vocab_keys_W)).argmax(-1)
    if not batch.has_greedy:
        return drawn_B
    return torch.where(batch.temperature_B > 0, drawn_B, scaled_BW.argmax(-1))


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


def _top_logprobs(scaled_BW: Tensor, log_total_B: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """([B, K] log-probs, [B, K] ids) of the most likely tokens, or None when none are asked for."""
    if count == 0:
        return None
    best = scaled_BW.topk(min(count, scaled_BW.shape[1]), dim=-1)
    return best.values - log_total_B[:, None], best.indices
