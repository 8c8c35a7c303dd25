"""Draws from softmax(logits / temperature) by the exponential race of vllm/v1/sample/rng.py, in one pass over logits.

Each program reads one part of a row's vocabulary; a second kernel compares the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sample_parts(
    logits: tl.tensor,  # fp32 [B, W], contiguous
    temperature: tl.tensor,  # fp32 [B], 0 = greedy
    keys: tl.tensor,  # int32 [B, 2]
    vocab_keys: tl.tensor,  # int32 [W]
    numbers: tl.tensor,  # fp32 [B, parts, 4]: peak, sum of weights, the race's best quotient, its winner's scaled logit
    tokens: tl.tensor,  # int32 [B, parts, 2]: the race's winner, -1 when a logit is not finite; the most likely one
    num_parts: tl.tensor,
    W: tl.constexpr,
    TILE_W: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = part * TILE_W + tl.arange(0, TILE_W)
    warmth = tl.load(temperature + row)
    given_W = tl.load(logits + row * W + w, mask=w < W, other=float("-inf"))
    num_wrong = tl.sum(tl.where((w < W) & ~(tl.abs(given_W) < float("inf")), 1, 0), 0)
    scaled_W = given_W / tl.where(warmth > 0, warmth, 1.0)
    peak = tl.max(scaled_W, 0)
    weights_W = tl.exp(scaled_W - tl.where(peak > float("-inf"), peak, 0.0))
    noise_W = _exponential_noise(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), vocab_keys, w, W)
    race_W = tl.where(w < W, weights_W / noise_W, -1.0)
    winner = tl.argmax(race_W, 0)
    at, is_winner = row * num_parts + part, w - part * TILE_W == winner
    tl.store(numbers + 4 * at, peak)
    tl.store(numbers + 4 * at + 1, tl.sum(weights_W, 0))
    tl.store(numbers + 4 * at + 2, tl.max(race_W, 0))
    tl.store(numbers + 4 * at + 3, tl.max(tl.where(is_winner, scaled_W, float("-inf")), 0))
    tl.store(tokens + 2 * at, tl.where(num_wrong > 0, -1, part * TILE_W + winner))
    tl.store(tokens + 2 * at + 1, part * TILE_W + tl.argmax(scaled_W, 0))


@triton.jit
def _exponential_noise(
    first_key: tl.tensor, second_key: tl.tensor, vocab_keys: tl.tensor, w: tl.tensor, W: tl.constexpr
) -> tl.tensor:
    """The noise of tokens `w`; integers wrap at 32 bits."""
    x_W = (first_key ^ tl.load(vocab_keys + w, mask=w < W, other=0)) * 747796405
    x_W = x_W ^ ((x_W >> 15) & 0x1FFFF)
    x_W = (x_W + second_key) * 277803737
    x_W = x_W ^ (x_W >> 15)
    u_W = tl.minimum((x_W.to(tl.float32) + 0.5) * 2.0**-31, 1.0 - 2.0**-24)
    # -log(1 - u): near 0 by its series, because 1 - u has lost the digits of u.
    series_W = u_W * (1.0 + u_W * (1 / 2 + u_W * (1 / 3 + u_W * (1 / 4 + u_W * (1 / 5 + u_W * (1 / 6 + u_W / 7))))))
    return tl.where(u_W < 0.0625, series_W, -tl.log(1.0 - u_W))


@triton.jit
def choose_part(
    numbers: tl.tensor,  # as `sample_parts` writes them
    tokens: tl.tensor,
    temperature: tl.tensor,
    sampled: tl.tensor,  # int64 [B]
    logprobs: tl.tensor,  # fp32 [B]
    num_parts: tl.tensor,
    TILE_PARTS: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_PARTS)
    at, is_part = row * num_parts + part, part < num_parts
    peak_P = tl.load(numbers + 4 * at, mask=is_part, other=float("-inf"))
    peak = tl.max(peak_P, 0)
    scale_P = tl.exp(peak_P - peak)
    log_total = tl.log(tl.sum(scale_P * tl.load(numbers + 4 * at + 1, mask=is_part, other=0.0), 0)) + peak
    race_P = tl.load(numbers + 4 * at + 2, mask=is_part, other=-1.0) * scale_P
    drawn, likely = tl.argmax(tl.where(is_part, race_P, -1.0), 0), tl.argmax(peak_P, 0)
    is_random = tl.load(temperature + row) > 0
    chosen = row * num_parts + tl.where(is_random, drawn, likely)
    token = tl.load(tokens + 2 * chosen + tl.where(is_random, 0, 1))
    logit = tl.where(is_random, tl.load(numbers + 4 * chosen + 3), peak)
    is_wrong = tl.min(tl.load(tokens + 2 * at, mask=is_part, other=0), 0) < 0
    tl.store(sampled + row, tl.where(is_wrong, -1, token).to(tl.int64))
    tl.store(logprobs + row, tl.where(is_wrong, float("nan"), logit - log_total))
