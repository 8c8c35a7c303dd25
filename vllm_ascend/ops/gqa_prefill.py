"""Causal grouped-query attention of packed new tokens over their cached context, as one kernel.

Limits: float16, bfloat16 or float32; head sizes to 768, up to 256 heads. The context of the step is gathered from its
pages: context tokens x G x 2 D elements beside the cache. Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm.ops.contract import KVCache, PrefillMetadata
from vllm_ascend.ops.kv_layout import read_tokens
from vllm_ascend.ops.packed_context import CAUSAL_FROM_THE_END, CausalTriangle, context_slots


class GqaPrefill:
    """See ``RolloutOps.gqa_prefill``."""

    def __init__(self) -> None:
        self._triangle = CausalTriangle()

    def __call__(self, q_TND: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        import torch_npu

        slots_S, heads, size = context_slots(meta), q_TND.shape[1], q_TND.shape[2]
        k_SGD, v_SGD = (read_tokens(pages, slots_S).unflatten(1, (-1, size)) for pages in cache)
        out_TND: Tensor = torch_npu.npu_fusion_attention(
            q_TND,
            k_SGD,
            v_SGD,
            heads,
            "TND",
            atten_mask=self._triangle.on(q_TND.device),
            scale=scale,
            actual_seq_qlen=np.cumsum(meta.query_lens_host).tolist(),
            actual_seq_kvlen=np.cumsum(meta.seq_lens_host).tolist(),
            sparse_mode=CAUSAL_FROM_THE_END,
        )[0]
        return out_TND
