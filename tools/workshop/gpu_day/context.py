"""Ring attention between context-parallel ranks on one device: every rank in turn, with what the others would send.

Letters: T tokens of all ranks, t = T/CP of one, N heads, D size of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.context_parallel import ContextShard, gathered_rows
from megatron.core.context_parallel.block import Block, BlockAttention, keys_of, take_rows
from megatron.core.context_parallel.ring import Arriving, Ring, attend_around
from megatron.core.ops import TrainOps, reference_ops, resolve
from megatron.core.packed_seq_params import PackedSeqParams
from tools.plan.device import DEVICE
from tools.plan.ops import Routing
from tools.plan.ops import train_ops as planned_train_ops
from tools.workshop.gpu_day.engines import TRAIN_OPS, gap
from tools.workshop.gpu_day.memory import SHARE, Peak, planned_device
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import measured_limits
from vllm.platforms import resolve_platform

CP, SIZE, SHARED, VALUE = 4, 192, 64, 128  # DeepSeek-V3's heads: a key, the part of it that all share, a value
_TOLERANCE = 2e-2  # of bfloat16, relative to the largest element


class Work(NamedTuple):
    """Sequences, each a multiple of 2 CP, and heads: of the comparison and, of one sequence, of the timed rank."""

    lengths: tuple[int, ...]
    heads: int
    timed_length: int
    timed_heads: int


_GPU, _CPU = Work((1024, 504, 8), 4, 34816, 16), Work((16, 8), 2, 64, 2)


@dataclass(frozen=True)
class HeldRing(Ring):
    """A ring whose ranks' blocks are all on this device; gradients of the others' blocks are kept, not sent."""

    blocks: Sequence[Block] = ()
    grads: list[tuple[int, Block]] = field(default_factory=list)  # rank, of its whole block or of its first chunks

    def pass_on(self, block: Block, step: int) -> Arriving:
        arriving = self.blocks[(self.rank + step + 1) % self.size]
        if not self.is_whole(step + 1):
            arriving = take_rows(arriving, self.shard.first_rows)
        return Arriving([arriving], [], [])

    def pass_back(self, grads: Block, step: int) -> Arriving:
        """What arrives is zero: the terms of other ranks are added where all of them are known."""
        self.grads.append(((self.rank + step) % self.size, grads))
        arriving = [self.space(grads, self.is_whole(step + 1))]
        if self.rank == step:
            arriving.append(self.space(grads, False))
        for block in arriving:
            for x in block:
                x.zero_()
        return Arriving(arriving, [], [])


def context_parallel(device: str, rows: Rows) -> None:
    """The output and gradients of all ranks against whole sequences, then the time and memory of one rank."""
    work = _GPU if device == "cuda" else _CPU
    _compare(work, device, rows)
    _measure(work, device, rows)


def _compare(work: Work, device: str, rows: Rows) -> None:
    params = PackedSeqParams(_bounds(work.lengths), max(work.lengths))
    whole = _inputs(sum(work.lengths), work.heads, "cpu", seed=0)
    grad = torch.randn(sum(work.lengths), work.heads, VALUE, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = _whole(reference_ops(), [x.float() for x in whole], grad.float(), params)
    found = _all_ranks(resolve(TRAIN_OPS), [x.to(device) for x in whole], grad.to(device), params)
    for name, ours, theirs in zip(("output", "q", "k", "v", "shared key"), found, wanted, strict=True):
        off = gap(ours, theirs)
        what = name if name == "output" else f"gradient of {name}"
        rows.holds(f"{what}, bf16", off <= _TOLERANCE, f"within {off:.1e} of whole sequences' in fp32, {CP} ranks")


def _whole(ops: TrainOps, inputs: list[Tensor], grad: Tensor, params: PackedSeqParams) -> list[Tensor]:
    """The output, and the gradients of q, k, v and the shared part of the keys."""
    q, *block = (x.requires_grad_() for x in inputs)
    bounds = params.cu_seqlens, params.max_seqlen
    out = ops.core_attention(q, keys_of(tuple(block)), block[1], *bounds, SIZE**-0.5, True)
    return [out.detach(), *torch.autograd.grad(out, (q, *block), grad)]


def _all_ranks(ops: TrainOps, inputs: list[Tensor], grad: Tensor, params: PackedSeqParams) -> list[Tensor]:
    """The same from rank after rank, in the order of whole sequences."""
    device = grad.device
    rows_T = gathered_rows(params.cu_seqlens, CP).argsort().to(device)  # the ranks' tokens, rank by rank
    by_rank = [[x[rows_t] for x in (*inputs, grad)] for rows_t in rows_T.chunk(CP)]
    blocks: list[Block] = [tuple(of_rank[1:-1]) for of_rank in by_rank]
    outs, grads_q = [], []
    grads = [[torch.zeros_like(x, dtype=torch.float32) for x in block] for block in blocks]
    for rank, (q, *_, grad_t) in enumerate(by_rank):
        ring = HeldRing(ContextShard.of(params, CP, rank, device), blocks=blocks)
        leaves = [x.requires_grad_() for x in (q, *(x.clone() for x in blocks[rank]))]
        out = attend_around(ring, leaves[0], tuple(leaves[1:]), None, BlockAttention(ops, SIZE**-0.5))
        grad_q, *home = torch.autograd.grad(out, leaves, grad_t)
        outs.append(out.detach())
        grads_q.append(grad_q)
        for owner, terms in [(rank, home), *ring.grads]:
            for total, term in zip(grads[owner], terms, strict=True):
                # Only first chunks travel to ranks after their owner.
                at = slice(None) if len(term) == len(total) else ring.shard.first_rows
                total[at] += term
    back_T = rows_T.argsort()
    of_blocks = (torch.cat(parts)[back_T] for parts in zip(*grads, strict=True))
    return [torch.cat(outs)[back_T], torch.cat(grads_q)[back_T], *of_blocks]


def _measure(work: Work, device: str, rows: Rows) -> None:
    peak_flops = measured_limits(device, rows).flops_per_s
    length, heads = work.timed_length, work.timed_heads
    took = {"forward": 0.0, "backward": 0.0}
    with planned_device() as planned:
        _rank(planned_train_ops("cuda", Routing()), length, heads, DEVICE.type, dict(took), lambda: None)
    with Peak(device).counted() as peak:
        for _ in range(3 if device == "cuda" else 1):
            _rank(resolve(TRAIN_OPS), length, heads, device, took, resolve_platform(device).synchronize)
    # Causal pairs of all ranks over CP; backward computes the scores again, and four products of gradients.
    products = {"forward": SIZE + VALUE, "backward": 3 * SIZE + 2 * VALUE}
    for name, sizes in products.items():
        flops = 2 * heads * sizes * length * (length + 1) / 2 / CP
        note = f"{1e3 * took[name]:.2f} ms of one of {CP} ranks, {length} tokens, {heads} heads, without transfers"
        rows.measured(name, flops / took[name] / peak_flops, "of the tensor cores' peak", note=note)
    in_plan = planned.meter.peak_bytes
    note = f"{peak.num_bytes / 2**20:.1f} MiB with the blocks of all ranks, {in_plan / 2**20:.1f} in the plan"
    rows.measured("peak memory of a rank", peak.num_bytes / in_plan, "of the plan", 1 - SHARE, note, most=1 + SHARE)


def _rank(
    ops: TrainOps, length: int, heads: int, device: str, took: dict[str, float], synchronize: Callable[[], Any]
) -> None:
    """Rank 1, which has blocks of earlier and of later ranks; its least seconds so far."""
    params, rank = PackedSeqParams(_bounds((length,)), length), 1
    inputs = [_inputs(length // CP, heads, device, seed) for seed in range(CP)]
    ring = HeldRing(ContextShard.of(params, CP, rank, torch.device(device)), blocks=[tuple(x[1:]) for x in inputs])
    q, *block = (x.requires_grad_() for x in inputs[rank])
    start = _now(synchronize)
    out = attend_around(ring, q, tuple(block), None, BlockAttention(ops, SIZE**-0.5))
    end_of_forward = _now(synchronize)
    torch.autograd.grad(out, (q, *block), torch.ones_like(out))
    end = _now(synchronize)
    for name, seconds in (("forward", end_of_forward - start), ("backward", end - end_of_forward)):
        took[name] = min(took[name] or seconds, seconds)


def _now(synchronize: Callable[[], Any]) -> float:
    synchronize()
    return time.perf_counter()


def _bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _inputs(num_tokens: int, heads: int, device: str, seed: int) -> list[Tensor]:
    """q [t, N, D], k [t, N, D - shared], v and the shared part of the keys [t, 1, shared], bf16."""
    torch.manual_seed(seed)
    shapes = ((heads, SIZE), (heads, SIZE - SHARED), (heads, VALUE), (1, SHARED))
    return [torch.randn(num_tokens, *shape, dtype=torch.bfloat16, device=device) for shape in shapes]
