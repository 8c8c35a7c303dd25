"""Attention between devices over hccl equals one CPU process, on the native ops, and never makes the host wait."""

from __future__ import annotations

import npusim
import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.context_parallel import COMM_TYPES, ContextParallelAttention, gathered_rows, zigzag_indices
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import one_process_groups
from tests.npu.test_attention_waits_for_nothing import HostReads
from tests.parallel.launcher import run_ranks

LENGTHS = [16, 8, 40]
HEADS, NOPE, ROPE, VALUE = 4, 16, 8, 16
NATIVE_OPS = {"npu_fusion_attention", "npu_fusion_attention_grad"}


def params() -> PackedSeqParams:
    return PackedSeqParams(torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32), max(LENGTHS))


def inputs() -> list[Tensor]:
    """q, k, v, what the heads share of their keys, and the output's gradient, of all tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, NOPE + ROPE), (HEADS, NOPE), (HEADS, VALUE), (1, ROPE), (HEADS, VALUE)]
    return [torch.randn(sum(LENGTHS), *shape, generator=generator) for shape in shapes]


def attend(groups: parallel_state.ProcessGroups, ops: TrainOps, tensors: list[Tensor], comm_type: str) -> list[Tensor]:
    """Output and gradients."""
    *leaves, grad = tensors
    q, k, v, shared_k = (x.requires_grad_() for x in leaves)
    out = ContextParallelAttention(groups, ops, 0.3, comm_type)(q, k, v, params(), shared_k)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def on_npu() -> list[tuple[list[Tensor], set[str], list[str]]]:
    """For each way to communicate: this rank's results, the ops that ran, and what the host waited for."""
    groups = parallel_state.initialize_model_parallel(context_parallel_size=2)
    mine = zigzag_indices(params().cu_seqlens, 2, groups.cp.rank())
    found = []
    for comm_type in COMM_TYPES:
        tensors = [x[mine].to("npu") for x in inputs()]
        npusim.reset_calls()
        with HostReads() as reads:
            results = attend(groups, train_ops(), tensors, comm_type)
        found.append(([x.to("cpu") for x in results], set(npusim.calls()), reads.seen))
    parallel_state.destroy_model_parallel()
    return found


def test_two_devices_equal_one_process() -> None:
    with one_process_groups() as groups:
        expected = attend(groups, reference_ops(), inputs(), "p2p")
    rows = gathered_rows(params().cu_seqlens, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NPU_COUNT", "2")
        ranks = run_ranks(on_npu, 2, device="npu")
    for comm_type, results in zip(COMM_TYPES, zip(*ranks, strict=True), strict=True):
        for place, wanted in enumerate(expected):
            found = torch.cat([tensors[place] for tensors, _, _ in results])[rows]
            assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max(), (comm_type, place)
        for _, ran, reads in results:
            assert ran >= NATIVE_OPS and not reads, (comm_type, ran, reads)
