"""Sampling with top-k and top-p as one kernel; edits, bans, min-p and the draw itself are the reference's, in torch's
own ops on the device, so that tokens are the same everywhere.

Source: npu_top_k_top_p, called with all three arguments, which torch_npu 2.5.1 demands. Limits of that kernel: every
row with a top_k in [1, 1024]; a batch in which a row has none or a larger one takes the reference's sort. What bans and
min-p have left out comes to it as -inf, also where fewer than top_k tokens are left. The race of
vllm/v1/sample/rng.py counts on integer products that wrap at 32 bits. Tolerance: the same tokens, except where the
rounding of the summed probabilities decides about the last token that top-p keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import SampledTokens, SamplingBatch
from vllm.ops.reference_sample import left_out, sample_with

MAX_TOP_K = 1024


def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
    """See ``RolloutOps.sample``."""
    return sample_with(logits_BW, batch, _left_out)


def _left_out(scaled_BW: Tensor, batch: SamplingBatch) -> Tensor:
    import torch_npu

    if batch.top_k_B is None or batch.max_top_k > MAX_TOP_K:
        return left_out(scaled_BW, batch)
    top_p_B = torch.ones_like(scaled_BW[:, 0]) if batch.top_p_B is None else batch.top_p_B
    filtered_BW: Tensor = torch_npu.npu_top_k_top_p(scaled_BW, top_p_B, batch.top_k_B)
    return filtered_BW == float("-inf")
