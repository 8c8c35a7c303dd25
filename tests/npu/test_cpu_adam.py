"""CPU Adam on the device: none of its state there by the allocator's count, and what crosses the link is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops.cpu import cpu_ops
from megatron.core.optimizer import DistributedOptimizer, HybridDeviceOptimizer, OptimizerConfig
from megatron.core.parallel_state import ProcessGroups
from mindspeed.ops import train_ops
from tests.npu.device_memory import held_bytes
from tests.parallel.toy import toy_config

WIDTH = 128
DEVICE = torch.device("npu:0")
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0, optimizer_cpu_offload=True)


def _model(groups: ProcessGroups, device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    stack.to(device, torch.bfloat16)
    return DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), stack, groups)


def _set_grads(optimizer: DistributedOptimizer, seed: int) -> None:
    """The same gradients on any device, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    for buffer in optimizer.model.param_and_grad_buffers:
        for start, end in buffer.param_ranges.values():
            buffer.grads.tensor[start:end] = torch.randn(end - start, generator=generator).to(
                buffer.grads.tensor.device
            )
    finalize_model_grads(optimizer.model, optimizer.groups)


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_the_device_holds_no_state_and_gets_the_hosts_updates(groups: ProcessGroups, is_overlapped: bool) -> None:
    model = _model(groups, DEVICE)
    held = held_bytes()
    config = replace(CONFIG, overlap_cpu_optimizer_d2h_h2d=is_overlapped)
    hosted = HybridDeviceOptimizer(config, model, groups, train_ops(), chunk_size=4096)
    assert held_bytes() == held  # not even while it is made
    assert all(slots.tensor.is_pinned() for slots in hosted.host_slots.values())
    plain = DistributedOptimizer(CONFIG, _model(groups, torch.device("cpu")), groups, cpu_ops())
    for seed in range(3):
        _set_grads(plain, seed), _set_grads(hosted, seed)
        before = held_bytes()
        torch.npu.reset_peak_memory_stats(DEVICE)
        is_updated, _, _ = hosted.step()
        plain.step()
        assert is_updated
        state_bytes = 12 * hosted.shards[0].numel
        assert int(torch.npu.max_memory_allocated(DEVICE)) - before < state_bytes / 16  # the norm's temporaries
        assert held_bytes() == before
        for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs)
    for ours, theirs in zip(hosted.param_shards(), plain.param_shards(), strict=True):
        assert ours.name == theirs.name
        assert all(torch.equal(ours.tensors[key], theirs.tensors[key]) for key in ours.tensors)
