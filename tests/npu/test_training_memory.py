"""What training holds on the device by the allocator's count: after an offload, and while losses are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops.reference_vocab import MAX_TEMPORARY_BYTES
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_entropy
from mindspeed.ops import train_ops
from tests.npu.device_memory import held_bytes
from tests.parallel.toy import toy_config

WIDTH = 128
DEVICE = torch.device("npu:0")


def _trainer(groups: ProcessGroups) -> DistributedOptimizer:
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE, torch.bfloat16)
    # Two buckets, as a large model has many.
    ddp_config = DistributedDataParallelConfig(bucket_size=WIDTH**2 + 1)
    model = DistributedDataParallel(toy_config(), ddp_config, stack, groups)
    assert len(model.param_and_grad_buffers) == 2
    return get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, groups, train_ops())


def _step(optimizer: DistributedOptimizer, seed: int) -> float:
    x_TH = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
    optimizer.zero_grad()
    optimizer.model(x_TH).float().square().sum().backward()
    finalize_model_grads(optimizer.model, optimizer.groups)
    is_updated, grad_norm, _ = optimizer.step()
    assert is_updated
    return grad_norm


def test_offload_frees_device_memory_and_training_goes_on_bit_identically(groups: ProcessGroups) -> None:
    stayed, moved = _trainer(groups), _trainer(groups)
    model = moved.model
    numel = sum(buffer.numel for buffer in model.param_and_grad_buffers)
    for seed in range(3):
        assert _step(stayed, seed) == _step(moved, seed)
        held = [held_bytes()]
        for free, num_bytes in ((model.offload_params, 2), (model.offload_grads, 4), (moved.offload, 12)):
            free()
            held.append(held_bytes())
            assert held[-2] - held[-1] == pytest.approx(num_bytes * numel, rel=0.01), free
        for get in (moved.onload, model.onload_grads, model.onload_params):
            get()
            held.append(held_bytes())
        assert held[4:] == held[2::-1]
    assert _step(stayed, 9) == _step(moved, 9)
    for ours, theirs in zip(model.parameters(), stayed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("what", ["log-probabilities", "entropy"])
def test_losses_of_a_large_vocabulary_take_bounded_memory(groups: ProcessGroups, what: str) -> None:
    """Without the kernels' own workspace, which a simulator cannot know."""
    torch.manual_seed(0)
    logits_TV, target_T = torch.randn(320, 64_640).bfloat16(), torch.randint(64_640, (320,))
    assert 4 * logits_TV.numel() > MAX_TEMPORARY_BYTES

    def value_T(logits_TV: torch.Tensor) -> torch.Tensor:
        if what == "entropy":
            return vocab_parallel_entropy(logits_TV, groups.tp, train_ops())
        return vocab_parallel_cross_entropy(logits_TV, target_T.to(logits_TV.device), groups.tp, train_ops())

    on_device = logits_TV.to(DEVICE).requires_grad_()
    before = held_bytes()
    torch.npu.reset_peak_memory_stats(DEVICE)
    loss_T = value_T(on_device)
    assert torch.npu.max_memory_allocated(DEVICE) - before < MAX_TEMPORARY_BYTES + 65536
    loss_T.sum().backward()
    peak_bytes = torch.npu.max_memory_allocated(DEVICE) - before
    assert peak_bytes < MAX_TEMPORARY_BYTES + logits_TV.nbytes + 65536  # the gradient, in the logits' dtype
    logits_TV.requires_grad_()
    value_T(logits_TV).sum().backward()
    torch.testing.assert_close(on_device.grad.cpu(), logits_TV.grad, rtol=1e-2, atol=1e-6)  # type: ignore[union-attr]
