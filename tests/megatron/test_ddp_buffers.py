"""Flat buffers: layout, gradient accumulation, and storages that are really freed and come back unchanged."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    NonFiniteGradientError,
    finalize_model_grads,
)
from megatron.core.distributed.param_and_grad_buffer import ALIGNMENT
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from tests.parallel.toy import ToyStage, toy_batches, toy_config


def _wrap(groups: ProcessGroups, **ddp: bool) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = toy_config()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), ToyStage(config, range(3)), groups)
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), model, groups, reference_ops())


def _train_step(model: DistributedDataParallel, optimizer: DistributedOptimizer, seed: int) -> float:
    optimizer.zero_grad()
    for x_TH, target_TH in toy_batches([6, 3], seed):
        (model(x_TH) - target_TH).square().sum().backward()
    finalize_model_grads(model, model.groups)
    is_updated, grad_norm, _ = optimizer.step()
    assert is_updated
    return grad_norm


def test_each_kind_of_parameter_is_one_range(one_rank: ProcessGroups) -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in {
                "norm": (10,),
                "partial_norm": (10,),
                "sharded": (8, 9),
                "partial": (5, 5),
                "copied": (3, 3),
                "expert": (2, 4, 4),
            }.items():
                setattr(self, name, nn.Parameter(torch.randn(shape)))
            self.sharded.tensor_model_parallel = True
            self.partial.sequence_parallel = self.partial_norm.sequence_parallel = True
            self.expert.allreduce = False

    module = Kinds()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    model = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), module, one_rank)
    dense, expert = model.param_and_grad_buffers
    assert list(dense.param_ranges) == ["sharded", "copied", "partial", "partial_norm", "norm"]
    assert list(expert.param_ranges) == ["expert"]
    starts = {name: start for name, (start, _) in dense.param_ranges.items()}
    assert all(start % ALIGNMENT == 0 for start in starts.values())
    assert dense.numel % ALIGNMENT == 0
    assert dense.decayed == (0, dense.param_ranges["partial"][1])
    assert dense.tp_duplicates == (starts["copied"], dense.param_ranges["norm"][1])
    assert dense.tp_partial == (starts["partial"], dense.param_ranges["partial_norm"][1])
    assert expert.decayed == (0, 32)
    assert expert.tp_duplicates == expert.tp_partial == (0, 0)
    assert all(torch.equal(param, before[name]) for name, param in module.named_parameters())
    assert dense.params.tensor.sum() == pytest.approx(sum(before[name].sum().item() for name in starts), abs=1e-4)
    assert dense.in_shard(dense.decayed) == dense.decayed


def test_a_model_that_is_not_used_any_more_is_freed(one_rank: ProcessGroups) -> None:
    model = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), nn.Linear(3, 2), one_rank)
    model(torch.ones(1, 3)).sum().backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_gradients_accumulate_in_fp32_and_grad_is_freed(one_rank: ProcessGroups) -> None:
    module = nn.Linear(4, 4).bfloat16()
    model = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), module, one_rank)
    for _ in range(300):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert module.weight.grad is None
    assert module.weight.main_grad.dtype == torch.float32
    assert module.weight.main_grad.eq(300).all()  # bf16 would stop at 256
    model.zero_grad_buffer()
    assert module.weight.main_grad.eq(0).all()


def test_a_gradient_that_an_op_has_added_itself_is_not_added_again(one_rank: ProcessGroups) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
            x, weight = ctx.saved_tensors
            weight.main_grad += grad * x
            weight.grad_added_to_main_grad = True
            return None, torch.full_like(weight, torch.nan)  # memory without values

    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(3))
    DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), module, one_rank)
    for _ in range(2):
        Scaled.apply(torch.arange(3.0), module.weight).sum().backward()
    (module.weight * 10).sum().backward()  # the next gradient may come in the other way
    assert module.weight.grad is None
    assert module.weight.main_grad.tolist() == [10.0, 12.0, 14.0]


def test_offload_frees_storage_and_training_goes_on_bit_identically(one_rank: ProcessGroups) -> None:
    stayed, moved = _wrap(one_rank), _wrap(one_rank)
    model, optimizer = moved
    for seed in range(3):
        assert _train_step(*stayed, seed) == _train_step(*moved, seed)
        model.offload_params()
        model.offload_params()
        model.offload_grads()
        optimizer.offload()
        flats = [*(b.params.tensor for b in model.param_and_grad_buffers)]
        flats += [b.grads.tensor for b in model.param_and_grad_buffers]
        flats += [item.tensor for shard in optimizer.shards for item in shard.tensors.values()]
        assert [flat.untyped_storage().nbytes() for flat in flats] == [0] * len(flats)
        assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
        with pytest.raises(AssertionError, match="parameters are offloaded"):
            model(torch.ones(1, 12))
        model.onload_params()
        model.onload_grads()
        optimizer.onload()
        optimizer.onload()
        for kept, back in zip(stayed[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(kept, back)
    assert _train_step(*stayed, 9) == _train_step(*moved, 9)
    assert all(torch.equal(a, b) for a, b in zip(stayed[0].parameters(), model.parameters(), strict=True))


def test_misuse_is_told(one_rank: ProcessGroups, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = _wrap(one_rank, check_for_nan_in_grad=True)
    with pytest.raises(AssertionError, match="finalize_model_grads"):
        optimizer.step()
    finalize_model_grads(model, one_rank)
    with pytest.raises(AssertionError, match="reduced already"):
        finalize_model_grads(model, one_rank)

    before = [param.detach().clone() for param in model.parameters()]
    optimizer.zero_grad()
    model.module.layers["1"].weight.main_grad[2, 3] = torch.nan
    with caplog.at_level(logging.ERROR):
        finalize_model_grads(model, one_rank)
        is_updated, grad_norm, _ = optimizer.step()
    assert not is_updated
    assert grad_norm != grad_norm
    assert "rank 0: 1 values of layers.1.weight are not finite" in caplog.text
    assert "the step is skipped" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.num_steps == 0

    with pytest.raises(ValueError, match="use_distributed_optimizer"):
        get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=False), model, one_rank, reference_ops())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_checked", [True, False])
def test_the_run_stops_with_parameter_and_micro_batch(one_rank: ProcessGroups, is_checked: bool, overlap: bool) -> None:
    """The second of three micro-batches overflows; later ones spread it, and only the switch can tell which it was."""
    config = toy_config()
    ddp_config = DistributedDataParallelConfig(
        check_for_nan_in_grad=is_checked, overlap_grad_reduce=overlap, bucket_size=1
    )
    model = DistributedDataParallel(config, ddp_config, ToyStage(config, range(3)), one_rank)
    optimizer_config = OptimizerConfig(lr=1e-2, on_non_finite_grads="stop")
    optimizer = get_megatron_optimizer(optimizer_config, model, one_rank, reference_ops())
    for bad, told in ((1, "micro-batch 1"), (2, "micro-batch 2")):
        optimizer.zero_grad()
        for micro_batch, (x_TH, target_TH) in enumerate(toy_batches([6, 3, 4])):
            with model.backward_of(micro_batch, is_last=micro_batch == 2):
                output_TH = model(x_TH)
                loss = (output_TH - target_TH).square().sum()
                (loss * torch.inf if micro_batch == bad else loss).backward()
        finalize_model_grads(model, one_rank)
        with pytest.raises(NonFiniteGradientError) as error:
            optimizer.step()
        assert (told in str(error.value)) == is_checked
        assert "12 values of norms.2.weight are not finite" in str(error.value)
        if not (is_checked and overlap and bad == 2):  # else looked at bucket by bucket, until the first find
            assert "finite; then norms.1.weight, " in str(error.value)
            assert str(error.value).endswith(" and 5 more")
    with pytest.raises(ValueError, match="on_non_finite_grads is 'hope'; it must be 'skip' or 'stop'"):
        OptimizerConfig(on_non_finite_grads="hope")


def test_a_frozen_parameter_keeps_its_value_and_is_offloaded_with_the_others(one_rank: ProcessGroups) -> None:
    stage = ToyStage(toy_config(), range(2))
    frozen = stage.layers["0"].weight
    frozen.requires_grad = False
    before = frozen.detach().clone()
    model = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), stage, one_rank)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, one_rank, reference_ops())
    moving = stage.layers["1"].weight.detach().clone()
    _train_step(model, optimizer, 0)
    model.offload_params()
    assert all(param.untyped_storage().nbytes() == 0 for param in model.parameters())
    model.onload_params()
    assert torch.equal(frozen, before)
    assert not torch.equal(stage.layers["1"].weight, moving)
    assert not hasattr(frozen, "main_grad")
    assert "layers.0.weight" not in {shard.name for shard in optimizer.param_shards()}
    assert "layers.0.weight" in model.state_dict()

    for param in stage.parameters():
        param.requires_grad = False
    still = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), stage, one_rank)
    nothing = get_megatron_optimizer(OptimizerConfig(lr=1e-2), still, one_rank, reference_ops())
    finalize_model_grads(still, one_rank)
    assert nothing.step() == (True, 0.0, None)


def test_step_equals_torch_adamw_with_clipping(one_rank: ProcessGroups) -> None:
    model, optimizer = _wrap(one_rank)
    plain = ToyStage(toy_config(), range(3))
    decayed = [param for param in plain.parameters() if param.dim() > 1]
    others = [param for param in plain.parameters() if param.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    for seed in range(3):
        grad_norm = _train_step(model, optimizer, seed)
        reference.zero_grad()
        for x_TH, target_TH in toy_batches([6, 3], seed):
            (plain(x_TH) - target_TH).square().sum().backward()
        want = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        assert grad_norm == pytest.approx(want.item(), rel=1e-6)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bf16_weights_follow_fp32_masters(one_rank: ProcessGroups) -> None:
    """Ten updates of 1e-3, each below half of bf16's spacing at 1, must not be lost."""
    module = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(module.weight)
    model = DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), module, one_rank)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, weight_decay=0), model, one_rank, reference_ops())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        finalize_model_grads(model, one_rank)
        optimizer.step()
    torch.testing.assert_close(optimizer.shards[0].master.tensor[:16], torch.full((16,), 0.99))
    assert module.weight.eq(torch.tensor(0.99, dtype=torch.bfloat16)).all()


class _Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.register_buffer("expert_bias", torch.tensor([0.5, 0.0, 0.0, 0.0]))
        self.register_buffer("local_tokens_per_expert", torch.tensor([1.0, 2.0, 2.0, 3.0]))


@pytest.mark.parametrize(("rate", "bias"), [(0.1, [0.6, 0.0, 0.0, -0.1]), (0.0, [0.5, 0.0, 0.0, 0.0])])
def test_expert_bias_moves_towards_balance(one_rank: ProcessGroups, rate: float, bias: list[float]) -> None:
    config = replace(toy_config(), moe_router_bias_update_rate=rate)
    router = _Router()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), router, one_rank)
    finalize_model_grads(model, one_rank)
    torch.testing.assert_close(router.expert_bias, torch.tensor(bias))
    assert router.local_tokens_per_expert.eq(0).all()


def test_the_third_step_in_a_row_without_an_update_stops_the_run(one_rank: ProcessGroups) -> None:
    """A gradient or a loss that is not finite leaves its step out; a whole step in between starts the count anew."""
    config = toy_config()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), ToyStage(config, range(3)), one_rank)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, one_rank, reference_ops())
    ((x_TH, target_TH),) = toy_batches([6])

    def step(factor: float, loss: float = 1.0) -> tuple[bool, float]:
        optimizer.zero_grad()
        with model.backward_of(0, is_last=True):
            ((model(x_TH) - target_TH).square().sum() * factor).backward()
        finalize_model_grads(model, one_rank)
        has_stepped, norm, _ = optimizer.step(torch.tensor(loss))
        return has_stepped, norm

    before = [param.detach().clone() for param in model.parameters()]
    assert not step(torch.nan)[0] and not step(1.0, torch.inf)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step(1.0)[0] and optimizer.num_steps == 1
    assert not step(torch.inf)[0] and not step(1.0, torch.nan)[0]
    with pytest.raises(
        NonFiniteGradientError, match=r"norm is nan in 3 steps in a row, after 1 updates\. .*the loss is not"
    ):
        step(1.0, torch.nan)
    with pytest.raises(
        NonFiniteGradientError, match=r"4 steps in a row.*rank 0: 12 values of norms\.2\.weight are not"
    ):
        step(torch.nan)
