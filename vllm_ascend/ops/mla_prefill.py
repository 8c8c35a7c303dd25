"""Causal MLA attention of packed new tokens over their cached context, as one kernel after expanding the latents.

Limits: float16, bfloat16 or float32; head sizes to 768. The keys and values of the step's whole context are expanded
at once: context tokens x heads x 2 x (P + R) elements beside the cache, so keep max_num_batched_tokens and chunks
modest. Tolerance: 1e-2 (bfloat16), 1e-5 (float32), relative.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.contract import KVCache, PrefillMetadata, Queries
from vllm_ascend.ops.kv_layout import read_tokens
from vllm_ascend.ops.packed_context import CausalAttention, context_slots


class MlaPrefill:
    """See ``RolloutOps.mla_prefill``."""

    def __init__(self) -> None:
        self._attend = CausalAttention()

    def __call__(self, q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        heads, nope = q[0].shape[1:]
        latent_SL, rope_SR = (read_tokens(pages, context_slots(meta)) for pages in cache)
        expanded_SNC = F.linear(latent_SL, kv_b_NCL.flatten(0, 1)).unflatten(-1, (heads, -1))
        q_TND = torch.cat(q, dim=-1)
        k_SND = torch.cat((expanded_SNC[..., :nope], rope_SR.unsqueeze(1).expand(-1, heads, -1)), dim=-1)
        v_SND = v_SNV = expanded_SNC[..., nope:]
        # NPU-ADAPTATION(prefill-pad-value): the packed kernel wants one head size for q, k and v, and MLA has 192
        # and 128; drop when the oldest CANN that we support takes them as they are.
        v_SND = F.pad(v_SNV, (0, q_TND.shape[-1] - v_SNV.shape[-1]))
        # NPU-ADAPTATION END
        return self._attend(q_TND, k_SND, v_SND, meta, scale)[..., : v_SNV.shape[-1]]
