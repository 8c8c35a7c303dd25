"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434 sec. 2.1) over a paged latent cache.

Letters: T tokens, H hidden, N heads of this rank, P nope and R rope channels of a query head, L KV latent, V value
channels.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    Norm,
    RowParallelLinear,
    empty_parameter,
    local_slice,
)
from vllm.model_executor.model_loader.weight_view import WeightView, view_of
from vllm.ops.contract import Angles, KVCache, RolloutOps, RunBeside, run_at_once
from vllm.ops.weights import WeightCopies, dense
from vllm.transformers_utils.config import HFConfig


class MultiHeadLatentAttention(nn.Module):
    """Prefill expands the latents into keys and values; decode stays in latent space: q W_UK against the cache, then
    W_UV.

    W_UK and W_UV are views of kv_b_proj's weight, so new weights need no refresh (held in FP8, of its blocks multiplied
    out for the call), or copies of these that follow it, dequantised.
    """

    def __init__(self, hf: HFConfig, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.hf, self.ops, self.tp = hf, ops, parallel.tp
        self.scale = hf.rope.softmax_scale(hf.qk_head_dim)
        self.num_heads = hf.num_attention_heads // parallel.tp.world_size
        query_rows = hf.num_attention_heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
        kv_a_rows = hf.kv_lora_rank + hf.qk_rope_head_dim
        if hf.q_lora_rank is None:
            self.qkv_a_proj = ColumnParallelLinear(hf.hidden_size, [kv_a_rows], ops)
            self.q_proj = ColumnParallelLinear(hf.hidden_size, [query_rows], ops, parallel.tp)
        else:
            self.qkv_a_proj = ColumnParallelLinear(hf.hidden_size, [hf.q_lora_rank, kv_a_rows], ops)
            self.q_a_layernorm = Norm(hf.q_lora_rank)
            self.q_proj = ColumnParallelLinear(hf.q_lora_rank, [query_rows], ops, parallel.tp)
        self.kv_a_layernorm = Norm(hf.kv_lora_rank)
        self.kv_b = empty_parameter(self.num_heads * (hf.qk_nope_head_dim + hf.v_head_dim), hf.kv_lora_rank)
        self.absorbed: WeightCopies | None = None
        if ops.copies_strided_weights and ops.mla_decode is not None:
            self.absorbed = WeightCopies(self.kv_b, self.num_heads, (hf.qk_nope_head_dim, hf.v_head_dim))
        self.write_beside: RunBeside = run_at_once
        # NPU-ADAPTATION(mla-second-stream): the kernel that writes the cache runs on the vector cores, while projecting
        # the queries keeps the matrix cores busy: on two streams they run at the same time; drop when one kernel does
        # both.
        if parallel.config.enable_multistream_mla and ops.run_beside is not None:
            self.write_beside = ops.run_beside
        # NPU-ADAPTATION END
        self.o_proj = RowParallelLinear(hf.num_attention_heads * hf.v_head_dim, hf.hidden_size, ops, parallel.tp)

    def forward(
        self, x_TH: Tensor, angles: Angles, cache: KVCache, context: ForwardContext, reduce: bool = True
    ) -> Tensor:
        """[T, H] -> [T, H], of the tokens that the context keeps; writes all tokens' latents to the cache.

        The result is summed over TP unless the caller does it.
        """
        hf, ops = self.hf, self.ops
        q_T, kv_TD = self._project(x_TH)
        norm = (self.kv_a_layernorm.weight, hf.rms_norm_eps)
        write = partial(ops.norm_rope_write_kv, cache, kv_TD, *norm, angles, context.slots_T)
        written = (self.write_beside if context.prefill is None else run_at_once)(write)
        if context.sampled_B is not None:
            q_T, *turns = (rows.index_select(0, context.sampled_B) for rows in (q_T, *angles))
            angles = turns[0], turns[1]
        q_TNC = self._queries(q_T).view(len(q_T), self.num_heads, -1)
        q_nope_TNP = q_TNC[..., : hf.qk_nope_head_dim]
        q_rope_TNR = ops.rotary_interleaved(q_TNC[..., hf.qk_nope_head_dim :], angles)
        is_multiplied = context.prefill is not None or self.absorbed is None  # by more than the copies of its halves
        kv_b_NCL = (dense(self.kv_b) if is_multiplied else self.kv_b).view(self.num_heads, -1, hf.kv_lora_rank)
        split, parts = context.num_decode_tokens, []
        written()
        if context.decode is not None and ops.mla_decode is None:
            queries = q_nope_TNP[:split], q_rope_TNR[:split]
            parts.append(ops.mla_prefill(queries, kv_b_NCL, cache, context.decode.as_prefill(), self.scale))
        elif context.decode is not None and ops.mla_decode is not None:
            w_uk_NPL, w_uv_NVL = kv_b_NCL.split((hf.qk_nope_head_dim, hf.v_head_dim), dim=1)
            # NPU-ADAPTATION(absorbed-weight-copies): the batched product copies an operand whose matrices do not lie
            # one after another, here 17 MB a layer and step for DeepSeek-V3 at TP 2; drop when it reads such views.
            if self.absorbed is not None:
                w_uk_NPL, w_uv_NVL = self.absorbed.tensors
            # NPU-ADAPTATION END
            q_latent_BNL = ops.head_linear(q_nope_TNP[:split], w_uk_NPL)
            out_BNL = ops.mla_decode((q_latent_BNL, q_rope_TNR[:split]), cache, context.decode, self.scale)
            parts.append(ops.head_linear(out_BNL, w_uv_NVL.transpose(1, 2)))
        if context.prefill is not None:
            queries = q_nope_TNP[split:], q_rope_TNR[split:]
            parts.append(ops.mla_prefill(queries, kv_b_NCL, cache, context.prefill, self.scale))
        out_TNV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(out_TNV.reshape(len(q_T), -1), reduce)

    def _project(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(what queries are made of, latents before their norm and the keys' channels before their turn [T, L + R])."""
        hf = self.hf
        down_T = self.qkv_a_proj(x_TH)
        if hf.q_lora_rank is None:
            return x_TH, down_T
        return down_T[:, : hf.q_lora_rank], down_T[:, hf.q_lora_rank :]

    def _queries(self, q_T: Tensor) -> Tensor:
        """[T, N * (P + R)] of the first of `_project`."""
        if self.hf.q_lora_rank is not None:
            q_T = self.ops.rms_norm(q_T, self.q_a_layernorm.weight, self.hf.rms_norm_eps)
        query_T: Tensor = self.q_proj(q_T)
        return query_T

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        kv_a, rows = f"{prefix}.kv_a_proj_with_mqa.weight", len(self.kv_b) * self.tp.world_size
        if self.hf.q_lora_rank is None:
            result = self.qkv_a_proj.weight_views(kv_a) | self.q_proj.weight_views(f"{prefix}.q_proj.weight")
        else:
            result = self.qkv_a_proj.weight_views(f"{prefix}.q_a_proj.weight", kv_a)
            result |= self.q_a_layernorm.weight_views(f"{prefix}.q_a_layernorm.weight")
            result |= self.q_proj.weight_views(f"{prefix}.q_b_proj.weight")
        kv_b_shape, kv_b_rows = (rows, self.hf.kv_lora_rank), local_slice(rows, self.tp)
        result[f"{prefix}.kv_b_proj.weight"] = view_of(self.kv_b, kv_b_shape, (kv_b_rows,), 0, slice(None))
        result |= self.kv_a_layernorm.weight_views(f"{prefix}.kv_a_layernorm.weight")
        return result | self.o_proj.weight_views(f"{prefix}.o_proj.weight")
