"""Norms, gates, rotary positions, cache writes and plain draws on NVIDIA devices: one pass over memory each.

Limits: float32, bfloat16 or float16, one dtype of all tensors but the angles; a row of a norm fits into the registers
of one program (up to 16,384 channels). Tolerance: 1e-6 (float32), 1e-2 (bfloat16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Angles, HeadNorms, KVCache, SampledTokens, SamplingBatch
from vllm.ops.cuda.launch import Launch, tile_for
from vllm.ops.reference_sample import sample as reference_sample
from vllm.utils import last_contiguous

_TILE_ELEMENTS = 2048  # of a program that has several heads, or a part of a vocabulary


class RowOps:
    """See the entries of ``RolloutOps`` with the names of the methods."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_TH = last_contiguous(x_TH)
        return self._norm(x_TH, None, weight_H, eps)

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH = last_contiguous(x_TH)
        return self._norm(x_TH, residual_TH.contiguous(), weight_H, eps), x_TH

    def _norm(self, x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float) -> Tensor:
        out_TH = x_TH.new_empty(x_TH.shape)
        has_residual, size = residual_TH is not None, x_TH.shape[1]
        arguments = x_TH, x_TH.stride(0), residual_TH if has_residual else x_TH, weight_H, out_TH, eps
        tile = {"HAS_RESIDUAL": has_residual, "H": size, "TILE_H": tile_for(size)}
        self._launch("rms_norm", (len(x_TH),), *arguments, **tile, num_warps=_warps(size))
        return out_TH

    def silu_and_mul(self, x_T2F: Tensor) -> Tensor:
        x_T2F = last_contiguous(x_T2F)
        width = x_T2F.shape[1] // 2
        out_TF, tile = x_T2F.new_empty(len(x_T2F), width), min(tile_for(width), 1024)
        grid = len(x_T2F), -(-width // tile)
        self._launch("silu_and_mul", grid, x_T2F, x_T2F.stride(0), out_TF, F=width, TILE_F=tile)
        return out_TF

    def rotary_interleaved(self, x_TNR: Tensor, angles: Angles) -> Tensor:
        cos_TR, sin_TR = angles
        x_TNR = last_contiguous(x_TNR)
        tokens, heads, channels = x_TNR.shape
        tile_R = tile_for(channels // 2)
        tile_N = min(tile_for(heads), max(1, _TILE_ELEMENTS // tile_R))
        out_TNR = x_TNR.new_empty(x_TNR.shape)
        arguments = x_TNR, *x_TNR.stride()[:2], cos_TR.contiguous(), sin_TR.contiguous(), out_TNR
        sizes = {"N": heads, "R": channels, "TILE_N": tile_N, "TILE_R": tile_R}
        self._launch("rotary_interleaved", (tokens, -(-heads // tile_N)), *arguments, **sizes)
        return out_TNR

    def norm_rope_write_kv(
        self, cache: KVCache, kv_TD: Tensor, weight_L: Tensor, eps: float, angles: Angles, slots_T: Tensor
    ) -> None:
        cos_TR, sin_TR = angles
        (pages,) = cache
        kv_TD = last_contiguous(kv_TD)
        latent = len(weight_L)
        rope = kv_TD.shape[1] - latent
        arguments = pages, kv_TD, kv_TD.stride(0), weight_L, cos_TR.contiguous(), sin_TR.contiguous(), slots_T, eps
        sizes = {"L": latent, "R": rope, "TILE_L": tile_for(latent), "TILE_R": tile_for(rope // 2)}
        self._launch("norm_rope_write_kv", (len(kv_TD),), *arguments, **sizes, num_warps=_warps(latent))

    def rope_write_gqa(
        self,
        cache: KVCache,
        qkv_TMD: Tensor,
        bias_MD: Tensor | None,
        norms: HeadNorms | None,
        angles: Angles,
        slots_T: Tensor,
    ) -> Tensor:
        cos_TR, sin_TR = angles
        (pages,) = cache
        qkv_TMD = last_contiguous(qkv_TMD)
        tokens, all_heads, channels = qkv_TMD.shape
        kv_heads = pages.shape[3]
        heads = all_heads - 2 * kv_heads
        tile_D = tile_for(channels)
        tile_M = min(tile_for(all_heads), max(1, _TILE_ELEMENTS // tile_D))
        q_TND = qkv_TMD.new_empty(tokens, heads, channels)
        bias = qkv_TMD if bias_MD is None else bias_MD.contiguous()
        weights = (qkv_TMD, qkv_TMD) if norms is None else (norms.q_weight_D, norms.k_weight_D)
        self._launch(
            "rope_write_gqa",
            (tokens, -(-all_heads // tile_M)),
            *(pages, qkv_TMD, *qkv_TMD.stride()[:2], bias, *weights, cos_TR.contiguous(), sin_TR.contiguous()),
            *(slots_T, q_TND, 0.0 if norms is None else norms.eps),
            HAS_BIAS=bias_MD is not None,
            HAS_NORMS=norms is not None,
            N=heads,
            G=kv_heads,
            D=channels,
            R=cos_TR.shape[1],
            TILE_M=tile_M,
            TILE_D=tile_D,
        )
        return q_TND

    def sample(self, logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws with limits, edits or reports of other tokens are the reference's: torch's ops, without a wait."""
        if not batch.is_plain or batch.num_top_logprobs:
            return reference_sample(logits_BW, batch)
        logits_BW = logits_BW.contiguous()
        rows, vocabulary = logits_BW.shape
        parts = -(-vocabulary // _TILE_ELEMENTS)
        numbers, tokens = logits_BW.new_empty(rows, parts, 4), logits_BW.new_empty(rows, parts, 2, dtype=torch.int32)
        keys = batch.keys_B2.contiguous(), batch.vocab_keys_W
        found, tile = (numbers, tokens), {"W": vocabulary, "TILE_W": _TILE_ELEMENTS}
        self._launch("sample_parts", (rows, parts), logits_BW, batch.temperature_B, *keys, *found, parts, **tile)
        tokens_B, logprobs_B = logits_BW.new_empty(rows, dtype=torch.int64), logits_BW.new_empty(rows)
        results = batch.temperature_B, tokens_B, logprobs_B
        self._launch("choose_part", (rows,), *found, *results, parts, TILE_PARTS=tile_for(parts))
        return SampledTokens(tokens_B, logprobs_B)


def _warps(channels: int) -> int:
    return 1 if channels <= 512 else 4 if channels <= 2048 else 8
