"""Cases of the rollout table's entries that ``tests.npu.rollout_op_cases`` has in tests of their own.

Letters: T tokens, B rows of a batch, V vocabulary, K choices.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.npu.op_parity import BF16, FP32, Call, Entry, Maker
from tests.npu.rollout_op_cases import Sizes
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import RolloutOps, SamplingBatch
from vllm.v1.sample.rng import position_keys, splitmix64, vocab_keys

_ROWS, _VOCABULARY = 6, 5000  # more than one part of a vocabulary


def latents_to_slots(new: Maker, size: Sizes) -> Call:
    """The pages after a step has written to some slots."""

    def run(ops: RolloutOps, kv_TD: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots_T: Tensor) -> list[Tensor]:
        blocks = size.tokens // size.block_size + 2
        cache = ops.new_kv_cache(blocks, size.block_size, size.latent, size.rope, kv_TD.dtype, kv_TD.device, "nd")
        ops.norm_rope_write_kv(cache, kv_TD, weight, 1e-6, (cos, sin), slots_T)
        return list(cache)

    cos, sin = (table.repeat(1, 2) for table in new.angles(size.tokens, size.rope // 2))
    kv_TD, slots_T = new.floats(size.tokens, size.latent + size.rope), torch.arange(size.tokens).flip(0) + 3
    return Call(run, [kv_TD, new.floats(size.latent), cos, sin, slots_T])


def add_rms_norm(new: Maker, size: Sizes) -> Call:
    tensors: list[Tensor | None] = [new.floats(size.tokens, size.hidden) for _ in range(2)]
    return Call(
        lambda ops, x, residual, weight: ops.add_rms_norm(x, residual, weight, 1e-6),
        [*tensors, new.floats(size.hidden)],
    )


def experts_of_one_rank(new: Maker, size: Sizes) -> Call:
    """An exchange that has nobody to send to."""

    def run(ops: RolloutOps, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        alone = GroupCoordinator(0, 1, None)
        return ops.exchanged_experts(x, (w13.transpose(1, 2), w2.transpose(1, 2)), (weights, ids), len(x), alone)

    w13 = new.floats(size.experts, size.hidden, 2 * size.width) / 4
    w2 = new.floats(size.experts, size.width, size.hidden) / 4
    weights = new.floats(size.tokens, size.choices, dtype=FP32).abs()
    ids = new.choices(size.tokens, size.choices, size.experts)
    return Call(run, [new.floats(size.tokens, size.hidden), w13, w2, weights, ids])


def plain_draws(new: Maker, size: Sizes) -> Call:
    """Greedy rows beside random ones; parts of the vocabulary that are excluded."""
    logits_BV = new.floats(_ROWS, _VOCABULARY) * 3
    logits_BV[3, : _VOCABULARY // 2] = -1e9
    return _draws(logits_BV, [])


def limited_draws(new: Maker, size: Sizes) -> Call:
    """By top-k, top-p and min-p."""
    limits = [torch.arange(_ROWS).int() * 7 + 1, torch.full((_ROWS,), 0.8), torch.full((_ROWS,), 0.02)]
    return _draws(new.floats(_ROWS, _VOCABULARY) * 3, limits)


def _draws(logits_BV: Tensor, limits: list[Tensor]) -> Call:
    """Token ids and log-probs; limits: none, or top-k, top-p and min-p."""
    temperature_B = torch.tensor([0.0, 1.0, 0.7]).repeat(_ROWS // 3)
    keys_B2 = torch.from_numpy(position_keys(splitmix64(np.arange(_ROWS, dtype=np.uint64)), np.arange(_ROWS)))
    largest_k = int(limits[0].max()) if limits else 0

    def run(ops: RolloutOps, logits_BV: Tensor, *tensors: Tensor) -> list[Tensor]:
        temperature_B, keys_B2, vocabulary_V, *given = tensors
        top_k_B, top_p_B, min_p_B = given or (None, None, None)
        settings = (temperature_B, keys_B2, vocabulary_V, top_k_B, top_p_B, None)
        sampled = ops.sample(logits_BV, SamplingBatch(*settings, True, True, largest_k, min_p_B=min_p_B))
        return [sampled.token_ids_B, sampled.logprobs_B]

    return Call(run, [logits_BV, temperature_B, keys_B2, torch.from_numpy(vocab_keys(_VOCABULARY)), *limits])


CASES = {
    "norm_rope_write_kv": Entry({"latents_to_slots": latents_to_slots}),
    "add_rms_norm": Entry({"add_rms_norm": add_rms_norm}),
    "exchanged_experts": Entry({"experts_of_one_rank": experts_of_one_rank}, tolerance={FP32: 1e-5, BF16: 1e-2}),
    "sample": Entry({"plain": plain_draws, "limited": limited_draws}, dtypes=(FP32,), tolerance={FP32: 1e-5}),
}
