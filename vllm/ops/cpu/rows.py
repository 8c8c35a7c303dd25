"""Ops of single rows on a CPU: norms, rotary positions, gates and sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.config import LOGPROBS_MODES
from vllm.ops import reference
from vllm.ops.contract import Angles, SampledTokens, SamplingBatch
from vllm.ops.cpu.calls import KernelCalls
from vllm.utils import last_contiguous


class RowOps:
    """See the entries of ``RolloutOps`` with the names of the methods."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out_TH = self._calls.empty(x_TH, *x_TH.shape)
        x_TH = last_contiguous(x_TH)
        mode = self._calls.mode(x_TH, weight_H)
        self._calls.run("cpu_rms_norm", mode, x_TH, x_TH.stride(0), *x_TH.shape, weight_H, eps, out_TH)
        return out_TH

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
        out_TH = self._calls.empty(x_TH, *x_TH.shape)
        mode = self._calls.mode(x_TH, weight_H)
        self._calls.run("cpu_add_rms_norm", mode, x_TH, residual_TH, *x_TH.shape, weight_H, eps, out_TH)
        return out_TH, x_TH

    def rotary_interleaved(self, x_TNR: Tensor, angles: Angles) -> Tensor:
        out_TNR = self._calls.empty(x_TNR, *x_TNR.shape)
        x_TNR = last_contiguous(x_TNR)
        x, turns = (x_TNR, *x_TNR.stride()[:2]), [part_TR.contiguous() for part_TR in angles]
        self._calls.run("cpu_rotary", self._calls.mode(x_TNR), *x, *x_TNR.shape, *turns, out_TNR)
        return out_TNR

    def silu_and_mul(self, x_T2F: Tensor) -> Tensor:
        out_TF = self._calls.empty(x_T2F, len(x_T2F), x_T2F.shape[1] // 2)
        x_T2F = last_contiguous(x_T2F)
        self._calls.run("cpu_silu_and_mul", self._calls.mode(x_T2F), x_T2F, x_T2F.stride(0), *out_TF.shape, out_TF)
        return out_TF

    def sample(self, logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        logits_BW = logits_BW.contiguous()
        if not batch.is_plain or batch.num_top_logprobs:
            found = reference.sample(logits_BW, batch)
            if batch.logprobs_mode == LOGPROBS_MODES[0]:  # summed as beside plain rows alone
                of_token = torch.empty_like(found.logprobs_B)
                tokens = found.token_ids_B, of_token
                self._calls.run("cpu_logprobs", logits_BW, *logits_BW.shape, batch.temperature_B, *tokens)
                found.logprobs_B = torch.where(found.logprobs_B.isnan(), found.logprobs_B, of_token)
            return found
        tokens_B = logits_BW.new_empty(len(logits_BW), dtype=torch.int64)
        logprobs_B = logits_BW.new_empty(len(logits_BW))
        keys = batch.keys_B2, batch.vocab_keys_W
        self._calls.run("cpu_sample", logits_BW, *logits_BW.shape, batch.temperature_B, *keys, tokens_B, logprobs_B)
        return SampledTokens(tokens_B, logprobs_B)
