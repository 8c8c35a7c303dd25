"""Ops of single rows on a CPU: norms, rotary positions, gates and sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops import reference
from vllm.ops.contract import SampledTokens, SamplingBatch
from vllm.ops.cpu.calls import KernelCalls, last_contiguous


class RowOps:
    """See the entries of ``RolloutOps`` with the names of the methods."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        rows, size = x_TH.shape
        out_TH = self._calls.empty(x_TH, rows, size)
        x_TH = last_contiguous(x_TH)
        self._calls.run(
            "cpu_rms_norm",
            self._calls.mode(x_TH, weight_H),
            x_TH.data_ptr(),
            x_TH.stride(0),
            rows,
            size,
            weight_H.data_ptr(),
            eps,
            out_TH.data_ptr(),
        )
        return out_TH

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TH, residual_TH = x_TH.contiguous(), residual_TH.contiguous()
        out_TH = self._calls.empty(x_TH, *x_TH.shape)
        self._calls.run(
            "cpu_add_rms_norm",
            self._calls.mode(x_TH, weight_H),
            x_TH.data_ptr(),
            residual_TH.data_ptr(),
            *x_TH.shape,
            weight_H.data_ptr(),
            eps,
            out_TH.data_ptr(),
        )
        return out_TH, x_TH

    def rotary_interleaved(self, x_TNR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        out_TNR = self._calls.empty(x_TNR, *x_TNR.shape)
        x_TNR = last_contiguous(x_TNR)
        self._calls.run(
            "cpu_rotary",
            self._calls.mode(x_TNR),
            x_TNR.data_ptr(),
            x_TNR.stride(0),
            x_TNR.stride(1),
            *x_TNR.shape,
            cos_TR.contiguous().data_ptr(),
            sin_TR.contiguous().data_ptr(),
            out_TNR.data_ptr(),
        )
        return out_TNR

    def silu_and_mul(self, x_T2F: Tensor) -> Tensor:
        rows, double = x_T2F.shape
        out_TF = self._calls.empty(x_T2F, rows, double // 2)
        x_T2F = last_contiguous(x_T2F)
        self._calls.run(
            "cpu_silu_and_mul",
            self._calls.mode(x_T2F),
            x_T2F.data_ptr(),
            x_T2F.stride(0),
            rows,
            double // 2,
            out_TF.data_ptr(),
        )
        return out_TF

    def sample(self, logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        if not batch.is_plain or batch.num_top_logprobs:
            return reference.sample(logits_BW, batch)
        logits_BW = logits_BW.contiguous()
        tokens_B = logits_BW.new_empty(len(logits_BW), dtype=torch.int64)
        logprobs_B = logits_BW.new_empty(len(logits_BW))
        self._calls.run(
            "cpu_sample",
            logits_BW.data_ptr(),
            *logits_BW.shape,
            batch.temperature_B.data_ptr(),
            batch.keys_B2.data_ptr(),
            batch.vocab_keys_W.data_ptr(),
            tokens_B.data_ptr(),
            logprobs_B.data_ptr(),
        )
        return SampledTokens(tokens_B, logprobs_B)
