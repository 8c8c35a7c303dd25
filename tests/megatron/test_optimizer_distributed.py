"""The distributed optimizer on two replicas: weights of one process after several steps, for sums and for means."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    NonFiniteGradientError,
    finalize_model_grads,
)
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import local_square_sum
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import ToyStage, toy_batches, toy_config


def _trainer(groups: ProcessGroups, is_mean: bool, is_sharded: bool) -> DistributedOptimizer:
    config = toy_config(calculate_per_token_loss=not is_mean)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    model = DistributedDataParallel(config, ddp_config, ToyStage(config, range(3)), groups)
    optimizer_config = OptimizerConfig(lr=1e-2, weight_decay=0.1, use_distributed_optimizer=is_sharded)
    return get_megatron_optimizer(optimizer_config, model, groups, reference_ops())


def _one_process(is_mean: bool) -> tuple[ToyStage, list[float]]:
    """Three steps over both replicas' micro-batches with torch's own AdamW."""
    model = ToyStage(toy_config(), range(3))
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == decayed] for decayed in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    norms = []
    for step in range(3):
        adamw.zero_grad()
        for x_TH, target_TH in toy_batches([6, 3], step):
            loss = (model(x_TH) - target_TH).square().sum()
            (loss / 2 if is_mean else loss).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        adamw.step()
    return model, norms


def _two_replicas() -> None:
    groups = initialize_model_parallel()
    for is_mean in (False, True):
        want, want_norms = _one_process(is_mean)
        for is_sharded in (True, False):
            optimizer = _trainer(groups, is_mean, is_sharded)
            model, norms = optimizer.model, []
            for step in range(3):
                optimizer.zero_grad()
                x_TH, target_TH = toy_batches([6, 3], step)[groups.coords.dp]
                (model(x_TH) - target_TH).square().sum().backward()
                finalize_model_grads(model, groups)
                is_updated, grad_norm, _ = optimizer.step()
                assert is_updated
                norms.append(grad_norm)
            assert norms == pytest.approx(want_norms, rel=1e-6)
            for got, expected in zip(model.parameters(), want.parameters(), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
            (state,) = optimizer.shards
            assert not state.buffer.is_expert
            numel = state.buffer.numel
            assert state.master.tensor.numel() == (numel // 2 if is_sharded else numel)
            _check_param_shards(optimizer, is_sharded)
            _check_state_dict(optimizer, _trainer(groups, is_mean, is_sharded))
    _check_bad_gradient_on_one_rank(groups)


def _check_param_shards(optimizer: DistributedOptimizer, is_sharded: bool) -> None:
    """Over the replicas every element of every parameter comes once, with the master weights of that very place."""
    params = dict(optimizer.model.module.named_parameters())
    covered = {name: torch.zeros(param.numel()) for name, param in params.items()}
    for shard in optimizer.param_shards():
        assert shard.shape == params[shard.name].shape
        part = slice(shard.start, shard.stop)
        covered[shard.name][part] += 1
        assert torch.equal(shard.tensors["master"], params[shard.name].flatten()[part])
        assert shard.tensors["exp_avg"].shape == shard.tensors["exp_avg_sq"].shape == (shard.stop - shard.start,)
    for name, times in covered.items():
        dist.all_reduce(times, group=optimizer.groups.dp)
        assert times.eq(1 if is_sharded else 2).all(), name


def _check_state_dict(optimizer: DistributedOptimizer, fresh: DistributedOptimizer) -> None:
    optimizer.offload()
    state = optimizer.state_dict()
    fresh.load_state_dict(state)
    assert fresh.num_steps == 3
    assert torch.equal(fresh.shards[0].exp_avg.tensor, state["dense_float32.exp_avg"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dense_float32.exp_avg has shape \(\).*num_steps is missing"):
        fresh.load_state_dict({k: v for k, v in state.items() if k != "num_steps"} | {"dense_float32.exp_avg": 1.0})
    optimizer.onload()


def _check_bad_gradient_on_one_rank(groups: ProcessGroups) -> None:
    """A value that is not finite on one replica stops the step on both."""
    optimizer = _trainer(groups, is_mean=False, is_sharded=True)
    before = [param.detach().clone() for param in optimizer.model.parameters()]
    if groups.rank == 1:
        optimizer.model.module.layers["0"].bias.main_grad[0] = torch.inf  # type: ignore[index,union-attr]
    finalize_model_grads(optimizer.model, groups)
    is_updated, _, _ = optimizer.step()
    assert not is_updated
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.model.parameters(), strict=True))
    optimizer.config = replace(optimizer.config, on_non_finite_grads="stop")
    with pytest.raises(NonFiniteGradientError, match=r"^[^;]*rank [01]: 1 values of layers.0.bias are not finite$"):
        optimizer.step()  # also on the rank that has nothing to tell


class _Kinds(nn.Module):
    """A weight split over TP, one that all TP ranks have, and an expert's, split over expert TP."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.copied, self.expert = (
            nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (3, 3), (2, 2, 2))
        )
        set_tensor_model_parallel_attributes(self.split, is_parallel=True, dim=0)
        set_tensor_model_parallel_attributes(self.copied, is_parallel=False)
        set_tensor_model_parallel_attributes(self.expert, is_parallel=False, allreduce=False)


def _every_axis() -> None:
    for axes in (
        {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ):
        groups = initialize_model_parallel(**axes)
        at = groups.layout
        dp, cp, tp = at.data_parallel_size, at.context_parallel_size, at.tensor_model_parallel_size
        for is_mean, is_sharded in ((True, True), (False, True), (True, False)):
            ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
            model = DistributedDataParallel(toy_config(not is_mean), ddp_config, _Kinds(), groups)
            config = OptimizerConfig(lr=1.0, weight_decay=0.0, use_distributed_optimizer=is_sharded, clip_grad=0.0)
            optimizer = get_megatron_optimizer(config, model, groups, reference_ops())
            for param in model.parameters():
                param.main_grad.fill_(1.0)  # type: ignore[attr-defined]
            finalize_model_grads(model, groups)
            _, grad_norm, _ = optimizer.step()
            scale = 1 / dp if is_mean else 1.0
            of_dense, of_expert = dp * cp * scale, at.expert_data_parallel_size * scale
            num_expert = at.expert_model_parallel_size * at.expert_tensor_parallel_size * 8
            assert grad_norm**2 == pytest.approx(of_dense**2 * (tp * 16 + 9) + of_expert**2 * num_expert)
            assert all(torch.allclose(param, torch.zeros(())) for param in model.parameters())  # 1 - lr: all moved once
        destroy_model_parallel()


def test_context_and_expert_parallel_replicas_are_summed_and_counted_once() -> None:
    run_ranks(_every_axis, 4, timeout_s=60)


def test_two_replicas_equal_one_process() -> None:
    run_ranks(_two_replicas, 2, timeout_s=60)


def test_the_norm_of_many_small_gradients_loses_nothing() -> None:
    grad = torch.randn(3 * 2**20 + 5, generator=torch.Generator().manual_seed(0))
    exact = grad.double().square().sum().item()
    assert local_square_sum([grad, grad[:7]]).item() == pytest.approx(exact + grad[:7].square().sum().item(), rel=1e-6)
    assert local_square_sum([grad[:0], grad.bfloat16()]).dtype == torch.float32
