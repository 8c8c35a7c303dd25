"""The table of NVIDIA devices without its kernels: what it allocates and what torch computes stays, values do not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vllm.ops import reference
from vllm.ops.contract import RolloutOps, SampledTokens, SamplingBatch
from vllm.ops.cuda.table import cuda_table


def rollout_ops() -> RolloutOps:
    """For runs whose course depends on no values but the choices of experts and tokens: Triton's interpreter would
    take minutes for them.
    """
    table = cuda_table(launch=lambda name, grid, *arguments, **options: None)

    def sample(logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        sampled = table.sample(logits_BW, batch)
        # No kernel has written them: a NaN that lay in that memory would end a sample, and on one rank of several.
        chosen = torch.zeros_like(sampled.token_ids_B), torch.zeros_like(sampled.logprobs_B)
        return replace(sampled, token_ids_B=chosen[0], logprobs_B=chosen[1])

    return replace(table, topk_router=reference.topk_router, sample=sample)
