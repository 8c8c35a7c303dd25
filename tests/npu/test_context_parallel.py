"""Attention between devices over hccl equals one CPU process, on the native ops, and never makes the host wait."""

from __future__ import annotations

import npusim
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.context_parallel import ContextParallelAttention, gathered_rows, zigzag_indices
from megatron.core.context_parallel.attention import COMM_TYPES
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import one_process_groups
from tests.npu.test_attention_waits_for_nothing import HostReads
from tests.parallel.launcher import run_ranks

LENGTHS = [16, 8, 40]
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 16, 8, 16, 12
NATIVE_OPS = {"npu_fusion_attention", "npu_fusion_attention_grad"}


def params() -> PackedSeqParams:
    return PackedSeqParams(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), max(LENGTHS))


def inputs() -> list[Tensor]:
    """q, latents, what the heads share of their keys, and the output's gradient, of all tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, NOPE + ROPE), (LATENT,), (1, ROPE), (HEADS, VALUE)]
    return [torch.randn(sum(LENGTHS), *shape, generator=generator) for shape in shapes]


def up_projection() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator) / LATENT**0.5


def attend(
    groups: parallel_state.ProcessGroups,
    ops: TrainOps,
    tensors: list[Tensor],
    weight: Tensor,
    comm_type: str,
    sends_latents: bool,
) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of the tokens' values, and the weight's gradient."""
    *leaves, grad = tensors
    q, latent, shared_k = (x.requires_grad_() for x in leaves)
    weight.requires_grad_()
    attention = ContextParallelAttention(groups, ops, 0.3, comm_type)
    if sends_latents:
        out = attention.attend_to_latents(q, latent, shared_k, weight, params(), VALUE)
    else:
        k, v = (latent @ weight.t()).unflatten(1, (HEADS, -1)).split([NOPE, VALUE], dim=-1)
        out = attention(q, k, v, params(), shared_k)
    out.backward(grad)
    assert weight.grad is not None
    return [out.detach(), *(x.grad for x in leaves)], weight.grad


CASES = [(comm_type, sends_latents) for comm_type in COMM_TYPES for sends_latents in (False, True)]


def on_npu() -> list[tuple[list[Tensor], Tensor, set[str], list[str]]]:
    """For each case: this rank's results, the weight's summed gradient, the ops that ran, what the host waited for."""
    groups = parallel_state.initialize_model_parallel(context_parallel_size=2)
    mine = zigzag_indices(params().cu_seqlens, 2, groups.cp.rank())
    found = []
    for case in CASES:
        tensors, weight = [x[mine].to("npu") for x in inputs()], up_projection().to("npu")
        npusim.reset_calls()
        with HostReads() as reads:
            results, weight_grad = attend(groups, train_ops(), tensors, weight, *case)
        dist.all_reduce(weight_grad, group=groups.cp)
        found.append(([x.cpu() for x in results], weight_grad.cpu(), set(npusim.calls()), reads.seen))
    parallel_state.destroy_model_parallel()
    return found


def test_two_devices_equal_one_process() -> None:
    with one_process_groups() as groups:
        expected, expected_of_weight = attend(groups, reference_ops(), inputs(), up_projection(), "p2p", False)
    rows = gathered_rows(params().cu_seqlens, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NPU_COUNT", "2")
        ranks = run_ranks(on_npu, 2, device="npu")
    for case, results in zip(CASES, zip(*ranks, strict=True), strict=True):
        pairs = [(torch.cat([found[0][i] for found in results])[rows], wanted) for i, wanted in enumerate(expected)]
        pairs.append((results[0][1], expected_of_weight))
        for place, (found, wanted) in enumerate(pairs):
            assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max(), (case, place)
        for _, _, ran, reads in results:
            assert ran >= NATIVE_OPS and not reads, (case, ran, reads)
