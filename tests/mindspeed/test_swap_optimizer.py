"""The swap optimizer gives the unswapped one's updates bit for bit, in whatever order its copies and updates run."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from mindspeed.core.optimizer.swap_optimizer import NUM_SLOTS, SwapOptimizer, get_swap_optimizer
from tests.megatron.streams_in_any_order import AnyOrder
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import ToyStage, toy_batches, toy_config

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)


def _model(groups: ProcessGroups, stage: ToyStage) -> DistributedDataParallel:
    return DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), copy.deepcopy(stage), groups)


def _step(optimizer: DistributedOptimizer, seed: int) -> float:
    model = optimizer.model
    optimizer.zero_grad()
    x_TH, target_TH = toy_batches([6, 3], seed)[optimizer.groups.coords.dp]
    dtype = next(model.parameters()).dtype
    (model(x_TH.to(dtype)) - target_TH).square().sum().backward()
    finalize_model_grads(model, optimizer.groups)
    is_updated, grad_norm, _ = optimizer.step()
    assert is_updated
    return grad_norm


def _assert_same(one: DistributedOptimizer, other: DistributedOptimizer) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])) for key in ours)


def _two_replicas() -> None:
    groups = initialize_model_parallel()
    for dtype in (torch.float32, torch.bfloat16):
        stage = ToyStage(toy_config(), range(3)).to(dtype)
        plain = get_megatron_optimizer(CONFIG, _model(groups, stage), groups, reference_ops())
        model = _model(groups, stage)
        swapped = SwapOptimizer(CONFIG, model, groups, reference_ops(), swap_times=5)
        for seed in range(3):
            assert _step(swapped, seed) == _step(plain, seed)
            _assert_same(swapped, plain)
        _check_checkpoints(swapped, plain, get_swap_optimizer(CONFIG, _model(groups, stage), groups, reference_ops()))


def _check_checkpoints(swapped: SwapOptimizer, plain: DistributedOptimizer, fresh: SwapOptimizer) -> None:
    """Either optimizer goes on from the other's state."""
    fresh.load_state_dict(plain.state_dict())
    assert fresh.num_steps == 3
    plain.load_state_dict(swapped.state_dict())
    swapped.offload()
    swapped.onload()
    assert _step(swapped, 7) == _step(plain, 7)
    _assert_same(swapped, plain)


def test_updates_equal_the_unswapped_optimizers_bit_for_bit() -> None:
    run_ranks(_two_replicas, 2, timeout_s=120)


def _one_rank() -> None:
    groups = initialize_model_parallel()
    stage = ToyStage(toy_config(), range(30))
    plain = get_megatron_optimizer(CONFIG, _model(groups, stage), groups, reference_ops())
    streams = map(AnyOrder, itertools.count())
    swapped = SwapOptimizer(
        CONFIG, _model(groups, stage), groups, reference_ops(), swap_times=5, make_streams=lambda _: next(streams)
    )
    (state,) = swapped.shards
    assert len(list(swapped._chunks(state, swapped.chunk_size))) > 3 * NUM_SLOTS
    for seed in range(8):
        assert _step(swapped, seed) == _step(plain, seed)
        _assert_same(swapped, plain)


def test_any_order_that_the_events_allow_gives_the_same_updates() -> None:
    """What a real device's streams may do and this machine's CPU never does."""
    run_ranks(_one_rank, 1, timeout_s=60)


def test_a_wrong_chunk_count_is_told() -> None:
    with pytest.raises(ValueError, match="swap_times is 0"):
        SwapOptimizer(CONFIG, None, None, None, swap_times=0)  # type: ignore[arg-type]
