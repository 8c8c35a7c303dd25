"""Causal grouped-query attention of packed new tokens over their cached context, as one kernel.

Limits: float16, bfloat16 or float32; head sizes to 768, up to 256 heads. The context of the step is gathered from its
pages: context tokens x G x 2 D elements beside the cache. Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

from torch import Tensor

from vllm.ops.contract import KVCache, PrefillMetadata
from vllm_ascend.ops.kv_layout import read_tokens
from vllm_ascend.ops.packed_context import CausalAttention, context_slots


class GqaPrefill:
    """See ``RolloutOps.gqa_prefill``."""

    def __init__(self) -> None:
        self._attend = CausalAttention()

    def __call__(self, q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        slots_S, size = context_slots(meta), q_TND.shape[2]
        k_SGD, v_SGD = (read_tokens(pages, slots_S).unflatten(1, (-1, size)) for pages in cache)
        return self._attend(q_TND, k_SGD, v_SGD, meta, scale)
