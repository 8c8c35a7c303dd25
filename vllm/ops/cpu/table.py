"""The table of a CPU: own kernels for everything a decode step runs, the reference for the rest.

Weights stay bfloat16 in memory; the products are made with the processor's bfloat16 instructions where it has them and
in float32 registers where not. A row's result does not depend on the rows beside it or on the number of threads, and a
prompt's tokens go through the same sums as decoded ones: chunks, preemption and cached prefixes change no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from math import prod

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops import reference
from vllm.ops.contract import (
    DecodeMetadata,
    KVCache,
    Matrices,
    PrefillMetadata,
    RolloutOps,
    SampledTokens,
    SamplingBatch,
)
from vllm.ops.cpu.build import has_compiler, kernels
from vllm.ops.cpu.compressed import CODED_DTYPE, CodedMatrices
from vllm.ops.cpu.graph import is_recording, launch
from vllm.ops.cpu.memory import LEAST_BYTES, StepMemory
from vllm.ops.reference_exchange import all_to_all_experts

logger = logging.getLogger(__name__)

Launch = Callable[..., None]

_FLOAT32 = 0  # mode of the kernels for float32 tensors
_PREFILL_TOKENS = 256  # attended to at a time: queries in latent space are wider than the model's own
_MLP_TOKENS = 512  # through a dense MLP at a time: enough that weights are read for less than products take
_NATIVE = (
    "linear",
    "head_linear",
    "rms_norm",
    "add_rms_norm",
    "rotary_interleaved",
    "norm_rope_write_kv",
    "mla_decode",
    "mla_prefill",
    "topk_router",
    "fused_experts",
    "silu_and_mul",
)


class Bfloat16Products(IntEnum):
    """How the kernels multiply bfloat16: each the same for all rows, in any batch; they differ in rounding."""

    WIDENED = 1  # in float32 registers: any processor
    DOT = 2  # by the instructions for pairs (AVX512-BF16)
    TILES = 3  # by those for tiles of 16 rows by 16 columns (AMX)


def rollout_ops() -> RolloutOps:
    """The table for this processor; builds the kernels when they are not there yet.

    Raises:
        RuntimeError: they cannot be built.
    """
    return cpu_table(best_products())


def default_ops() -> RolloutOps:
    """`rollout_ops` where there is a compiler; else the reference, with a warning: a machine without one still runs.

    Raises:
        RuntimeError: there is a compiler, but the kernels cannot be built.
    """
    if has_compiler():
        return rollout_ops()
    logger.warning(
        "no C++ compiler (g++, or the one in CXX): rollout runs on the reference ops, several times slower than on the "
        "kernels it could build"
    )
    return reference.rollout_ops()


def uncompressed_ops() -> RolloutOps:
    """`default_ops` with weights as they are in memory: a third more bytes to read, the same results."""
    return replace(default_ops(), coded_dtypes=())


def best_products() -> Bfloat16Products:
    """The quickest way that this processor has instructions for, and the system lets us use."""
    if kernels().cpu_may_use_tiles():
        return Bfloat16Products.TILES
    has_pairs = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return Bfloat16Products.DOT if has_pairs else Bfloat16Products.WIDENED


def cpu_table(products: Bfloat16Products, launch: Launch = launch) -> RolloutOps:
    """The table that multiplies bfloat16 in one way; pairs are emulated where the processor has no instructions.

    launch: runs a kernel, given its name and its arguments; or does not, where the memory is only planned.
    """
    return _CpuOps(products, launch).table()


class _CpuOps:
    """The entries, with the kernels' way of multiplying bfloat16 chosen."""

    def __init__(self, products: Bfloat16Products, launch: Launch = launch) -> None:
        self._launch = launch
        self._memory = StepMemory()
        self.by_row = (torch.bfloat16,) if products is Bfloat16Products.TILES else ()
        self.modes = {torch.float32: _FLOAT32, torch.bfloat16: int(products)}
        kernels()  # built now, not in the first step

    def table(self) -> RolloutOps:
        base = reference.rollout_ops()
        entries = {name: getattr(self, name) for name in (*_NATIVE, "exchanged_experts", "sample")}
        names = base.names | dict.fromkeys(_NATIVE, "native")
        names |= {"exchanged_experts": "native experts, reference exchange"}
        names |= {"sample": "native without filters, reference with them"}
        return replace(
            base,
            **entries,
            names=names,
            not_recordable=("gqa_decode", "exchanged_experts"),
            by_row_dtypes=self.by_row,
            coded_dtypes=tuple(dtype for dtype in self.by_row if dtype is CODED_DTYPE),
            mlp_tokens=_MLP_TOKENS,
            has_one_attention=True,
            widened=self._widened,
            release_memory=self._memory.release,
        )

    def linear(self, x_TI: Tensor, weight_OI: Matrices) -> Tensor:
        rows = x_TI.shape[0]
        x_TI = _last_contiguous(x_TI)
        if isinstance(weight_OI, CodedMatrices):
            assert x_TI.dtype in self.by_row and weight_OI.experts == 1
            parts, size_out, size_in = weight_OI.parts, weight_OI.rows, weight_OI.columns
            mode, address, strides = self._mode(x_TI), None, (0, 0)
            places = weight_OI.places().ctypes.data
        else:
            parts, (size_out, size_in), (n_stride, k_stride) = 1, weight_OI.shape, weight_OI.stride()
            mode, address, strides = self._mode(x_TI, weight_OI), weight_OI.data_ptr(), (k_stride, n_stride)
            places = None
        out_TO = self._empty(x_TI, rows, parts * size_out)
        self._launch(
            "cpu_head_linear",
            mode,
            x_TI.data_ptr(),
            x_TI.stride(0),
            0,
            rows,
            parts,
            address,
            0,
            *strides,
            places,
            size_in,
            size_out,
            out_TO.data_ptr(),
        )
        return out_TO

    def head_linear(self, x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
        out_TNO = self._empty(x_TNI, *x_TNI.shape[:2], weight_NIO.shape[2])
        self._write_head_linear(x_TNI, weight_NIO, out_TNO)
        return out_TNO

    def _write_head_linear(self, x_TNI: Tensor, weight_NIO: Tensor, out_TNO: Tensor) -> None:
        rows, heads, size_in = x_TNI.shape
        size_out = weight_NIO.shape[2]
        assert out_TNO.is_contiguous() and out_TNO.dtype is x_TNI.dtype, (out_TNO.stride(), out_TNO.dtype)
        x_TNI = _last_contiguous(x_TNI)
        self._launch(
            "cpu_head_linear",
            self._mode(x_TNI, weight_NIO),
            x_TNI.data_ptr(),
            x_TNI.stride(0),
            x_TNI.stride(1),
            rows,
            heads,
            weight_NIO.data_ptr(),
            *weight_NIO.stride(),
            None,
            size_in,
            size_out,
            out_TNO.data_ptr(),
        )

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        rows, size = x_TH.shape
        out_TH = self._empty(x_TH, rows, size)
        x_TH = _last_contiguous(x_TH)
        self._launch(
            "cpu_rms_norm",
            self._mode(x_TH, weight_H),
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
        out_TH = self._empty(x_TH, *x_TH.shape)
        self._launch(
            "cpu_add_rms_norm",
            self._mode(x_TH, weight_H),
            x_TH.data_ptr(),
            residual_TH.data_ptr(),
            *x_TH.shape,
            weight_H.data_ptr(),
            eps,
            out_TH.data_ptr(),
        )
        return out_TH, x_TH

    def rotary_interleaved(self, x_TNR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        out_TNR = self._empty(x_TNR, *x_TNR.shape)
        x_TNR = _last_contiguous(x_TNR)
        self._launch(
            "cpu_rotary",
            self._mode(x_TNR),
            x_TNR.data_ptr(),
            x_TNR.stride(0),
            x_TNR.stride(1),
            *x_TNR.shape,
            cos_TR.contiguous().data_ptr(),
            sin_TR.contiguous().data_ptr(),
            out_TNR.data_ptr(),
        )
        return out_TNR

    def norm_rope_write_kv(
        self,
        cache: KVCache,
        kv_TD: Tensor,
        weight_L: Tensor,
        eps: float,
        cos_TR: Tensor,
        sin_TR: Tensor,
        slots_T: Tensor,
    ) -> None:
        (pages,) = cache
        kv_TD = _last_contiguous(kv_TD)
        latent = len(weight_L)
        self._launch(
            "cpu_write_kv",
            self._mode(kv_TD, weight_L, pages),
            pages.data_ptr(),
            kv_TD.data_ptr(),
            kv_TD.stride(0),
            len(kv_TD),
            latent,
            kv_TD.shape[1] - latent,
            weight_L.data_ptr(),
            eps,
            cos_TR.contiguous().data_ptr(),
            sin_TR.contiguous().data_ptr(),
            slots_T.data_ptr(),
        )

    def mla_decode(
        self, q_latent_BNL: Tensor, q_rope_BNR: Tensor, cache: KVCache, meta: DecodeMetadata, scale: float
    ) -> Tensor:
        return self._attend(q_latent_BNL, q_rope_BNR, cache, meta.block_tables, meta.seq_lens_host, scale)

    def mla_prefill(
        self,
        q_nope_TNP: Tensor,
        q_rope_TNR: Tensor,
        kv_b_NCL: Tensor,
        cache: KVCache,
        meta: PrefillMetadata,
        scale: float,
    ) -> Tensor:
        """In latent space like a decode step, each token a query that sees the tokens before it."""
        if "queries" not in meta.scratch:
            meta.scratch["queries"] = _queries_of(meta)
        tables_TW, visible_T = meta.scratch["queries"]
        nope = q_nope_TNP.shape[2]
        w_uk_NPL, w_uv_NLV = kv_b_NCL[:, :nope], kv_b_NCL[:, nope:].transpose(1, 2)
        out_TNV = self._empty(q_nope_TNP, *q_nope_TNP.shape[:2], w_uv_NLV.shape[2])
        for start in range(0, len(q_nope_TNP), _PREFILL_TOKENS):
            part = slice(start, start + _PREFILL_TOKENS)
            q_latent = self.head_linear(q_nope_TNP[part], w_uk_NPL)
            attended = self._attend(q_latent, q_rope_TNR[part], cache, tables_TW[part], visible_T[part], scale)
            self._write_head_linear(attended, w_uv_NLV, out_TNV[part])
        return out_TNV

    def _attend(
        self,
        q_latent_BNL: Tensor,
        q_rope_BNR: Tensor,
        cache: KVCache,
        tables_BW: Tensor,
        seq_lens_B: np.ndarray,
        scale: float,
    ) -> Tensor:
        (pages,) = cache
        q_latent_BNL, q_rope_BNR = _last_contiguous(q_latent_BNL), _last_contiguous(q_rope_BNR)
        queries, heads, latent = q_latent_BNL.shape
        out_BNL = self._empty(q_latent_BNL, queries, heads, latent)
        self._launch(
            "cpu_mla_attention",
            self._mode(q_latent_BNL, q_rope_BNR, pages),
            q_latent_BNL.data_ptr(),
            q_latent_BNL.stride(0),
            q_latent_BNL.stride(1),
            q_rope_BNR.data_ptr(),
            q_rope_BNR.stride(0),
            q_rope_BNR.stride(1),
            queries,
            heads,
            pages.data_ptr(),
            tables_BW.data_ptr(),
            seq_lens_B.ctypes.data,
            tables_BW.stride(0),
            pages.shape[1],
            latent,
            q_rope_BNR.shape[2],
            scale,
            out_BNL.data_ptr(),
        )
        return out_BNL

    def topk_router(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        normalize: bool,
        scaling: float,
        scoring: str = "sigmoid",
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE.dtype == torch.float32 and scoring in ("sigmoid", "softmax"), (logits_TE.dtype, scoring)
        logits_TE = logits_TE.contiguous()
        rows, experts = logits_TE.shape
        weights_TK = logits_TE.new_empty(rows, top_k)
        ids_TK = logits_TE.new_empty(rows, top_k, dtype=torch.int64)
        self._launch(
            "cpu_topk_router",
            logits_TE.data_ptr(),
            None if bias_E is None else bias_E.data_ptr(),
            rows,
            experts,
            top_k,
            num_groups,
            topk_groups,
            int(normalize),
            scaling,
            int(scoring == "softmax"),
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
        )
        return weights_TK, ids_TK

    def fused_experts(
        self,
        x_TH: Tensor,
        w13_E2FH: Matrices,
        w2_EHF: Matrices,
        weights_TK: Tensor,
        ids_TK: Tensor,
        first_expert: int,
    ) -> Tensor:
        out_TH = self._empty(x_TH, *x_TH.shape)
        if len(x_TH) == 0:
            return out_TH
        x_TH, weights_TK, ids_TK = _last_contiguous(x_TH), weights_TK.float().contiguous(), ids_TK.contiguous()
        if is_coded := isinstance(w2_EHF, CodedMatrices):
            assert isinstance(w13_E2FH, CodedMatrices) and w13_E2FH.parts == 2 and x_TH.dtype in self.by_row
            experts, hidden, width = w2_EHF.experts, w2_EHF.rows, w2_EHF.columns
            mode, w13, w2 = self._mode(x_TH), w13_E2FH.places().ctypes.data, w2_EHF.places().ctypes.data
        else:
            assert isinstance(w13_E2FH, Tensor)
            experts, hidden, width = w2_EHF.shape
            in_order = torch.Tensor.contiguous if x_TH.dtype in self.by_row else _in_out
            w13_E2FH, w2_EHF = in_order(w13_E2FH), in_order(w2_EHF)
            mode = self._mode(x_TH, w13_E2FH, w2_EHF)
            w13, w2 = w13_E2FH.data_ptr(), w2_EHF.data_ptr()
        self._launch(
            "cpu_fused_experts",
            mode,
            x_TH.data_ptr(),
            x_TH.stride(0),
            *ids_TK.shape,
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
            w13,
            w2,
            int(is_coded),
            experts,
            hidden,
            width,
            first_expert,
            out_TH.data_ptr(),
        )
        return out_TH

    def exchanged_experts(
        self,
        x_TH: Tensor,
        w13_E2FH: Matrices,
        w2_EHF: Matrices,
        weights_TK: Tensor,
        ids_TK: Tensor,
        num_active: int,
        group: GroupCoordinator,
    ) -> Tensor:
        return all_to_all_experts(x_TH, w13_E2FH, w2_EHF, weights_TK, ids_TK, num_active, group, self.fused_experts)

    def silu_and_mul(self, x_T2F: Tensor) -> Tensor:
        rows, double = x_T2F.shape
        out_TF = self._empty(x_T2F, rows, double // 2)
        x_T2F = _last_contiguous(x_T2F)
        self._launch(
            "cpu_silu_and_mul",
            self._mode(x_T2F),
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
        self._launch(
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

    def _widened(self, x_TH: Tensor) -> Tensor:
        if x_TH.dtype is torch.float32 or not self._is_for_step(prod(x_TH.shape), torch.float32):
            return x_TH.float()
        return self._memory.empty(*x_TH.shape, dtype=torch.float32).copy_(x_TH)

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        if self._is_for_step(prod(shape), like.dtype):
            return self._memory.empty(*shape, dtype=like.dtype)
        return like.new_empty(shape)

    def _is_for_step(self, num_values: int, dtype: torch.dtype) -> bool:
        """Whether a result is large, and of nobody who keeps account of what is allocated: a plan, a recording."""
        return num_values * dtype.itemsize >= LEAST_BYTES and self._launch is launch and not is_recording()

    def _mode(self, first: Tensor, *others: Tensor) -> int:
        for other in others:
            assert other.dtype is first.dtype, (first.dtype, other.dtype)
        return self.modes[first.dtype]


def _in_out(weight_EOI: Tensor) -> Tensor:
    """The same matrices with memory [E, I, O]: a view's, or a copy's."""
    return weight_EOI.transpose(1, 2).contiguous().transpose(1, 2)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _queries_of(meta: PrefillMetadata) -> tuple[Tensor, np.ndarray]:
    """Of each new token: (int32 [T, max_blocks] its block table, int64 [T] the tokens it sees)."""
    lens = meta.query_lens_host
    starts = np.repeat(np.cumsum(lens) - lens, lens)
    before = np.repeat(meta.seq_lens_host - lens, lens)
    visible_T = np.ascontiguousarray(before + np.arange(len(starts)) - starts + 1, dtype=np.int64)
    rows_T = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    return meta.block_tables.index_select(0, rows_T), visible_T
