"""Op tables of planned devices: the tensors that kernels keep for the backward pass, and a given routing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.ops import TrainOps, reference_ops
from megatron.core.ops.contract import Attended, Bounds, RouterRule
from megatron.core.ops.cpu import cpu_ops
from megatron.core.ops.reference_attention import MAX_SCORES, attention_block, attention_block_grad
from megatron.core.ops.reference_moe import topk_router
from tools.plan.train_cuda import cuda_table
from tools.plan.train_npu import grouped_matmul, kernel, npu_table


@dataclass(frozen=True)
class Routing:
    """How the tokens of every rank spread over the experts, the same on all ranks.

    load: rows that reach this rank's experts, over the mean of the ranks that share them; 1 is balanced, and no rank
    can have more than ``num_ranks`` · first, num_local: this rank's experts · num_ranks: that share the experts.
    """

    load: float = 1.0
    first: int = 0
    num_local: int = 0
    num_ranks: int = 1

    def chosen(self, num_tokens: int, topk: int, num_experts: int) -> Tensor:
        """int64 [T, K] on the host."""
        total = num_tokens * topk
        choices = torch.arange(total)
        if self.load == 1.0 or self.num_ranks == 1:
            return (choices % num_experts).view(num_tokens, topk)
        share = min(self.load / self.num_ranks, self.num_local / topk, 1.0)
        num_here = round(total * share)
        here = self.first + choices[:num_here] % self.num_local
        others = choices[num_here:] % max(num_experts - self.num_local, 1)
        elsewhere = others + (others >= self.first) * self.num_local
        return torch.cat([here, elsewhere % num_experts]).view(num_tokens, topk)


def train_ops(
    device: str, routing: Routing, pads_values: bool = True, tp_comm_overlap: bool = False, has_fp8: bool = False
) -> TrainOps:
    """The table that a run uses on ``device`` (cpu, cuda or npu), with its experts chosen by ``routing``.

    Those of cuda and npu keep the tensors that their kernels keep; their results have shapes and no values.
    pads_values: Ascend's attention widens values to the keys' head size · tp_comm_overlap: as of the run · has_fp8:
    CUDA's products are of FP8 blocks.

    Raises:
        ValueError: the run's table has no such form.
    """
    if tp_comm_overlap and device != "cuda":
        raise ValueError(f"tp_comm_overlap=True, but the train ops of {device} have no such form; leave it out")
    table = cpu_ops() if device == "cpu" else reference_ops()
    if device != "cpu":
        table = replace(table, attention_block=_attention_block, attention_block_grad=_attention_block_grad)
        table = replace(table, core_attention=_padded_attention, grouped_matmul=grouped_matmul)
    if device == "npu":
        table = npu_table(table, pads_values)
    elif device == "cuda":
        table = cuda_table(table, tp_comm_overlap, has_fp8)

    def route(
        logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        chosen_TK = routing.chosen(logits_TE.shape[0], rule.topk, logits_TE.shape[1])  # also where choices are replayed
        return topk_router(logits_TE, rule, expert_bias, chosen_TK)

    return replace(table, topk_router=route)


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
) -> Tensor:
    """The reference's attention: every sequence is padded to the longest, through torch's fused kernel."""
    rows = (cu_seqlens.numel() - 1) * max_seqlen
    padded = tuple(x.new_empty(rows, q.shape[1], q.shape[2]) for x in (q, k, v))
    log_sums = torch.empty(rows, q.shape[1], dtype=torch.float32, device=q.device)
    wide_out = q.new_empty(rows, q.shape[1], q.shape[2])
    return kernel(q.new_empty(*q.shape[:2], v.shape[-1]), (*padded, wide_out, log_sums), q, k, v)


def _attention_block(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """The reference's attention of its first two pieces: all others need what the second does."""
    return attention_block(q, k, v, _two_pieces(q, bounds), scale, causal)


def _attention_block_grad(
    grad_out: Tensor, attended: Attended, bounds: Bounds, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_block_grad(grad_out, attended, _two_pieces(attended[0], bounds), scale, causal)


def _two_pieces(q: Tensor, bounds: Bounds) -> Bounds:
    """Bounds of as many queries of the longest sequence as two of the reference's pieces have."""
    ends_q, ends_k = (ends.tolist() for ends in bounds)
    (start_q, end_q), (start_k, end_k) = max(
        zip(pairwise(ends_q), pairwise(ends_k), strict=True),
        key=lambda spans: (spans[0][1] - spans[0][0]) * (spans[1][1] - spans[1][0]),
    )
    step = max(1, MAX_SCORES // max(1, q.shape[1] * (end_k - start_k)))
    return torch.tensor([start_q, min(end_q, start_q + 2 * step)]), torch.tensor([start_k, end_k])
