"""A mixture of experts over the ranks of an engine.

With expert parallel, the experts are split over all TP x DP ranks, and tokens reach them in one of two ways
(`expert_exchange`):
  all_gather  every rank gathers the tokens of all DP replicas, runs its own experts on all of them, and one
              reduce-scatter over the EP group gives each replica the sums for its own tokens (with TP, one all-reduce,
              of which it keeps its own rows).
  dispatch    the TP ranks of a replica share its tokens out among themselves, each sends its part to the ranks that
              hold the chosen experts and gets the results back, and one all-reduce over TP puts the parts together.
              With `use_sequence_parallel_moe` they share them out before: attention's output is reduce-scattered over
              TP, norm and shared experts (whole on every rank) see a rank's own tokens, and one all-gather puts the
              layer's results together. That is half of what the two all-reduces send.
Without, every expert is split over TP along its width and replicas have nothing to do with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator, ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.linear import (
    ALONE,
    ColumnParallelLinear,
    RowParallelLinear,
    empty_parameter,
    local_slice,
)
from vllm.model_executor.layers.token_share import TokenShare
from vllm.model_executor.model_loader.weight_view import WeightView, empty_view, view_of, whole_view
from vllm.ops.contract import Choices, ExpertMatrices, KVCache, RolloutOps, RouterSettings, RunBeside, run_when_asked
from vllm.transformers_utils.config import HFConfig


class DeepseekMLP(nn.Module):
    """down(silu(gate x) * up x), its width split over TP (not split with tp=ALONE)."""

    def __init__(self, hidden: int, width: int, tp: GroupCoordinator, ops: RolloutOps) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up_proj = ColumnParallelLinear(hidden, [width, width], ops, tp)
        self.down_proj = RowParallelLinear(width, hidden, ops, tp)

    def forward(self, x_TH: Tensor, reduce: bool = True) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x_TH)), reduce)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        gate_up = self.gate_up_proj.weight_views(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        return gate_up | self.down_proj.weight_views(f"{prefix}.down_proj.weight")


def balanced_logits(logits_TE: Tensor, top_k: int, first_token: int = 0) -> Tensor:
    """Logits that send token t to the experts (first_token + t) * K ... + K-1, modulo E: all get the same load."""
    num_tokens, num_experts = logits_TE.shape
    first_T = (torch.arange(num_tokens, device=logits_TE.device) + first_token) * top_k
    chosen_TK = (first_T[:, None] + torch.arange(top_k, device=logits_TE.device)) % num_experts
    return torch.full_like(logits_TE, -15.0).scatter_(1, chosen_TK, 15.0)


SharedResult: TypeAlias = Callable[[], Tensor] | None
"""The shared experts' partial sums [T, H], when they are asked for; None where there are none."""


class FusedMoE(nn.Module):
    """Router, routed experts of this rank, and shared experts."""

    def __init__(self, hf: HFConfig, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        self.hf, self.parallel, self.ops = hf, parallel, ops
        self.is_expert_parallel = parallel.config.enable_expert_parallel
        self.width_group = ALONE if self.is_expert_parallel else parallel.tp
        self.num_local_experts = hf.n_routed_experts // parallel.ep.world_size
        self.first_expert = parallel.ep.rank_in_group * self.num_local_experts
        width = hf.moe_intermediate_size // self.width_group.world_size
        # The router is computed in fp32 in every step, so its weight is held in fp32.
        self.gate = empty_parameter(hf.n_routed_experts, hf.hidden_size, dtype=torch.float32)
        self.e_score_correction_bias: nn.Parameter | None = None
        if hf.has_expert_bias:
            self.e_score_correction_bias = empty_parameter(hf.n_routed_experts, dtype=torch.float32)
        self.w13 = ops.new_weight([width, width], hf.hidden_size, self.num_local_experts)
        self.w2 = ops.new_weight([hf.hidden_size], width, self.num_local_experts)
        self.shared_experts = None
        if hf.n_shared_experts:
            shared_width = hf.moe_intermediate_size * hf.n_shared_experts
            shared_group = ALONE if self.shares_tokens else parallel.tp
            self.shared_experts = DeepseekMLP(hf.hidden_size, shared_width, shared_group, ops)
        weighting = hf.norm_topk_prob, hf.routed_scaling_factor, hf.scoring_func
        self.routing = RouterSettings(hf.num_experts_per_tok, hf.n_group, hf.topk_group, *weighting)
        self.run_shared: RunBeside = run_when_asked
        # NPU-ADAPTATION(shared-experts-second-stream): while tokens travel to their experts and back, a die's cores
        # have nothing to do but the shared experts, which need no other rank; drop when dispatch and combine run them.
        if parallel.config.multistream_overlap_shared_expert and ops.run_beside is not None:
            self.run_shared = ops.run_beside
        # NPU-ADAPTATION END

    @property
    def shares_tokens(self) -> bool:
        """Whether the layer calls `of_share` instead of this module, when it has tokens."""
        return self.parallel.config.shares_tokens

    def token_share(self, num_tokens: int, context: ForwardContext) -> TokenShare:
        """This rank's share of a step's tokens; every rank of the exchange has as many rows."""
        return TokenShare.of(self.parallel.tp, num_tokens, max(context.dp_token_counts))

    def forward(self, x_TH: Tensor, context: ForwardContext) -> Tensor:
        """[T, H] -> [T, H]. In lock-step every rank calls it, with T = 0 when it has nothing to do."""
        longest, dp_rank = max(context.dp_token_counts), self.parallel.config.dp_rank
        if longest == 0:
            return x_TH
        shared = self._start_shared(x_TH, context)
        if self.parallel.exchange.world_size > 1:
            return self._dispatched(x_TH, context, shared)
        if not self.parallel.config.steps_in_lockstep:
            out_TH = self._routed(x_TH, context, slice(None))
            _add_shared(out_TH, shared)
            group = self.parallel.ep if self.is_expert_parallel else self.parallel.tp
            return group.all_reduce(out_TH)
        padded_SH = x_TH if len(x_TH) == longest else F.pad(x_TH, (0, 0, 0, longest - len(x_TH)))
        everyones_TH = self.parallel.dp.all_gather(padded_SH).flatten(0, 1)
        own = slice(dp_rank * longest, dp_rank * longest + len(x_TH))
        out_GSH = self._routed(everyones_TH, context, own).view(-1, *padded_SH.shape)
        if self.parallel.tp.world_size == 1:  # a rank needs its own tokens' sums alone
            own_TH = self.parallel.ep.reduce_scatter(out_GSH)[0, : len(x_TH)]
            _add_shared(own_TH, shared)
            return own_TH
        own_TH = out_GSH[dp_rank, : len(x_TH)]
        _add_shared(own_TH, shared)  # the TP ranks' partial sums ride on the all-reduce of the experts
        self.parallel.ep.all_reduce(out_GSH)
        return own_TH

    def of_share(self, x_SH: Tensor, share: TokenShare, context: ForwardContext) -> Tensor:
        """[S, H] -> [S, H] of a rank's own tokens; collective over the ranks that exchange tokens."""
        shared = self._start_shared(x_SH, context)
        out_SH = self._exchanged(x_SH, share, context)
        _add_shared(out_SH, shared)
        return out_SH

    def _dispatched(self, x_TH: Tensor, context: ForwardContext, shared: SharedResult) -> Tensor:
        share = self.token_share(len(x_TH), context)
        out_SH = self._exchanged(share.own(x_TH), share, context)
        out_TH = torch.zeros_like(x_TH)
        out_TH[share.tokens] = out_SH[: share.num_active]
        _add_shared(out_TH, shared)
        return self.parallel.tp.all_reduce(out_TH)

    def _exchanged(self, x_SH: Tensor, share: TokenShare, context: ForwardContext) -> Tensor:
        """The routed experts of a rank's own tokens."""
        choices = self._route(x_SH)
        if context.routed_experts is not None:
            context.routed_experts.append(share.gather(choices[1]))
        return self.ops.exchanged_experts(x_SH, self._operands(), choices, share.num_active, self.parallel.exchange)

    def _routed(self, x_TH: Tensor, context: ForwardContext, own: slice) -> Tensor:
        """This rank's experts on all of x; `own` are the rows of this replica."""
        choices = self._route(x_TH)
        if context.routed_experts is not None:
            context.routed_experts.append(choices[1][own])
        return self.ops.fused_experts(x_TH, self._operands(), choices, self.first_expert)

    def _operands(self) -> ExpertMatrices:
        return self.ops.operand(self.w13), self.ops.operand(self.w2)

    def _route(self, x_TH: Tensor) -> Choices:
        logits_TE = self.ops.linear(x_TH, self.gate)
        if self.parallel.config.force_load_balancing:
            first_token = self.parallel.exchange.rank_in_group * len(x_TH)  # dispatch: each rank routes other tokens
            logits_TE = balanced_logits(logits_TE, self.routing.top_k, first_token)
        return self.ops.topk_router(logits_TE, self.e_score_correction_bias, self.routing)

    def _start_shared(self, x_TH: Tensor, context: ForwardContext) -> SharedResult:
        """Return the function that gives the shared experts' partial sums."""
        if self.shared_experts is None or len(x_TH) == 0:
            return None
        run = self.run_shared if context.prefill is None else run_when_asked
        return run(partial(self.shared_experts, x_TH, reduce=False))

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        result = {f"{prefix}.gate.weight": whole_view(self.gate)}
        if self.e_score_correction_bias is not None:
            result[f"{prefix}.gate.e_score_correction_bias"] = whole_view(self.e_score_correction_bias)
        for expert in range(self.hf.n_routed_experts):
            result |= self._expert_views(f"{prefix}.experts.{expert}", expert - self.first_expert)
        if self.shared_experts is not None:
            result |= self.shared_experts.weight_views(f"{prefix}.shared_experts")
        return result

    def _expert_views(self, prefix: str, local: int) -> dict[str, WeightView]:
        hidden, full_width = self.hf.hidden_size, self.hf.moe_intermediate_size
        up_shape, down_shape = (full_width, hidden), (hidden, full_width)
        names = [f"{prefix}.{kind}_proj.weight" for kind in ("gate", "up", "down")]
        if not 0 <= local < self.num_local_experts:
            shapes = (up_shape, up_shape, down_shape)
            return {name: empty_view(shape, self.w13.dtype) for name, shape in zip(names, shapes, strict=True)}
        share = local_slice(full_width, self.width_group)
        width = share.stop - share.start
        gate, up = slice(0, width), slice(width, 2 * width)
        return {
            names[0]: view_of(self.w13, up_shape, (share,), 0, gate, local),
            names[1]: view_of(self.w13, up_shape, (share,), 1, up, local),
            names[2]: view_of(self.w2, down_shape, (slice(None), share), 0, slice(0, hidden), local),
        }


def _add_shared(out_TH: Tensor, shared: SharedResult) -> None:
    if shared is not None:
        out_TH += shared()


def new_choices_cache(hf: HFConfig, num_blocks: int, block_size: int, device: torch.device) -> KVCache:
    """One tensor [num_blocks, block_size, M, K], uint8 or, with more than 256 experts, int32: M MoE layers, K choices.

    The experts that every token in the KV cache went to are stored block by block beside the latents, to be replayed in
    training. They live and die with the cache: blocks that requests share carry their choices along, a preempted
    request's are written again, a moved request's travel with its blocks.
    """
    dtype = torch.uint8 if hf.n_routed_experts <= 256 else torch.int32
    shape = (num_blocks, block_size, hf.num_moe_layers, hf.num_experts_per_tok)
    return (torch.zeros(shape, dtype=dtype, device=device),)


def bytes_per_token(hf: HFConfig) -> int:
    """What the choices of one token take."""
    return hf.num_moe_layers * hf.num_experts_per_tok * (1 if hf.n_routed_experts <= 256 else 4)


def write_choices(cache: KVCache, ids_of_layers: list[Tensor], slots_T: Tensor) -> None:
    """Every MoE layer's ids_TK to the tokens' slots."""
    (pages,) = cache
    ids_TMK = torch.stack(ids_of_layers, dim=1).to(pages.dtype)
    pages.view(-1, *pages.shape[2:]).index_copy_(0, slots_T, ids_TMK)


def read_choices(cache: KVCache, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
    """[num_tokens, M, K], uint8 or int16, of the sequence whose tokens lie in `blocks`, in order."""
    (pages,) = cache
    block_ids = torch.from_numpy(blocks.astype(np.int64)).to(pages.device)
    choices = pages.index_select(0, block_ids).flatten(0, 1)[:num_tokens].cpu()
    result: np.ndarray = choices.to(torch.uint8 if pages.dtype == torch.uint8 else torch.int16).numpy()
    return result
