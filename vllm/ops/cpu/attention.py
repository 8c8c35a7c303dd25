"""Absorbed latent attention on a CPU. A prompt's tokens go through the same sums as decoded ones, bit for bit.

Letters: see vllm/ops/contract.py.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm.ops.contract import Angles, DecodeMetadata, KVCache, PrefillMetadata, Queries
from vllm.ops.cpu.calls import KernelCalls
from vllm.ops.cpu.linear import LinearOps
from vllm.utils import last_contiguous

_PREFILL_TOKENS = 256  # attended to at a time: queries in latent space are wider than the model's own


class LatentAttentionOps:
    """See ``RolloutOps.norm_rope_write_kv``, ``mla_decode`` and ``mla_prefill``."""

    def __init__(self, calls: KernelCalls, linear: LinearOps) -> None:
        self._calls, self._linear = calls, linear

    def norm_rope_write_kv(
        self, cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
    ) -> None:
        (pages,) = cache
        kv_TD = last_contiguous(kv_TD)
        latent = len(weight_L)
        kv = pages, kv_TD, kv_TD.stride(0), len(kv_TD), latent, kv_TD.shape[1] - latent
        turns = [part_TR.contiguous() for part_TR in angles]
        self._calls.run("cpu_write_kv", self._calls.mode(kv_TD, weight_L, pages), *kv, weight_L, eps, *turns, slots_T)

    def mla_decode(self, q: Queries, cache: KVCache, meta: DecodeMetadata, scale: float) -> Tensor:
        return self._attend(q, cache, meta.block_tables, meta.seq_lens_host, scale)

    def mla_prefill(self, q: Queries, kv_b_NCL: Tensor, cache: KVCache, meta: PrefillMetadata, scale: float) -> Tensor:
        """Attend in latent space as a decode step does: each token is a query that sees the tokens before it."""
        q_nope_TNP, q_rope_TNR = q
        if "queries" not in meta.scratch:
            meta.scratch["queries"] = meta.as_queries()
        tables_TW, visible_T = meta.scratch["queries"]
        nope = q_nope_TNP.shape[2]
        w_uk_NPL, w_uv_NLV = kv_b_NCL[:, :nope], kv_b_NCL[:, nope:].transpose(1, 2)
        out_TNV = self._calls.empty(q_nope_TNP, *q_nope_TNP.shape[:2], w_uv_NLV.shape[2])
        for start in range(0, len(q_nope_TNP), _PREFILL_TOKENS):
            part = slice(start, start + _PREFILL_TOKENS)
            q_latent = self._linear.head_linear(q_nope_TNP[part], w_uk_NPL)
            attended = self._attend((q_latent, q_rope_TNR[part]), cache, tables_TW[part], visible_T[part], scale)
            self._linear.write_head_linear(attended, w_uv_NLV, out_TNV[part])
        return out_TNV

    def _attend(self, q: Queries, cache: KVCache, tables_BW: Tensor, seq_lens_B: np.ndarray, scale: float) -> Tensor:
        (pages,) = cache
        q_latent_BNL, q_rope_BNR = map(last_contiguous, q)
        queries, heads, latent = q_latent_BNL.shape
        out_BNL = self._calls.empty(q_latent_BNL, queries, heads, latent)
        mode = self._calls.mode(q_latent_BNL, q_rope_BNR, pages)
        read = q_latent_BNL, *q_latent_BNL.stride()[:2], q_rope_BNR, *q_rope_BNR.stride()[:2]
        cached = pages, tables_BW, seq_lens_B, tables_BW.stride(0), pages.shape[1]
        self._calls.run(
            "cpu_mla_attention", mode, *read, queries, heads, *cached, latent, q_rope_BNR.shape[2], scale, out_BNL
        )
        return out_BNL
