"""Experts' weight gradients are added to the float32 buffer inside the grouped product: no pass over all weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.moe.experts import GroupedMLP
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import tiny_config
from tools.plan.op_costs import by_phase, report

npusim = pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
# Rows of each of the eight experts in every micro-batch: idle experts, one micro-batch without any row.
MICRO_BATCHES = [[3, 0, 5, 1, 0, 2, 4, 0], [0] * 8, [0, 7, 1, 0, 2, 2, 0, 1]]


def _main_grads(
    groups: ProcessGroups, ops: TrainOps, device: str, dtype: torch.dtype, **ddp: bool
) -> dict[str, Tensor]:
    """Of all micro-batches, on the CPU."""
    config = tiny_config(params_dtype=dtype)
    experts = GroupedMLP(config, groups, ops)
    experts.init_weights(WeightInit(3, 0.2), "experts")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), experts.to(device), groups)
    generator = torch.Generator().manual_seed(1)
    npusim.reset_calls()
    for counts in MICRO_BATCHES:
        rows = torch.randn(sum(counts), config.hidden_size, generator=generator).to(dtype).to(device)
        upstream = torch.randn(sum(counts), config.hidden_size, generator=generator).to(dtype).to(device)
        model(rows.requires_grad_(), torch.tensor(counts)).backward(upstream)
    assert all(param.grad is None for param in experts.parameters())
    return {name: param.main_grad.float().cpu() for name, param in experts.named_parameters()}  # type: ignore[attr-defined]


def test_products_are_added_in_float32_without_a_pass_over_the_weights(groups: ProcessGroups) -> None:
    found = _main_grads(groups, train_ops(), "npu", torch.bfloat16)
    calls, costs = npusim.calls(), by_phase(npusim.typed_calls())
    exact = _main_grads(groups, reference_ops(), "cpu", torch.float32)
    assert calls["npu_grouped_matmul_add_"] == 2 * 2  # two weights; nothing to add without rows
    assert not calls.keys() & {"aten::masked_fill_", "aten::fill_", "aten::zero_", "aten::zeros", "aten::add_"}
    assert not any(phase.control or phase.unknown for phase in costs.values()), report(costs)
    for name, grad in exact.items():
        assert (found[name] - grad).abs().max() <= 1e-2 * grad.abs().max(), name


@pytest.mark.parametrize(
    ("dtype", "ddp", "is_fused"),
    [(torch.float32, {}, True), (torch.bfloat16, {"grad_reduce_in_fp32": False}, True), (torch.bfloat16, {}, False)],
    ids=["fp32", "bf16 sums", "switched off"],
)
def test_what_the_kernel_does_not_take_goes_through_autograd(
    groups: ProcessGroups, dtype: torch.dtype, ddp: dict[str, bool], is_fused: bool
) -> None:
    found = _main_grads(groups, train_ops(gemm_gradient_accumulation_fusion=is_fused), "npu", dtype, **ddp)
    assert "npu_grouped_matmul_add_" not in npusim.calls()
    exact = _main_grads(groups, reference_ops(), "cpu", torch.float32)
    for name, grad in exact.items():
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert (found[name] - grad).abs().max() <= tolerance * grad.abs().max(), name
