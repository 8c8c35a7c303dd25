"""CPU Adam gives the plain optimizer's updates bit for bit, however much of it is on the host and in whatever order."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointSaver, load_checkpoint
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops.cpu import cpu_ops
from megatron.core.optimizer import DistributedOptimizer, HybridDeviceOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import NUM_SLOTS
from megatron.core.parallel_state import ProcessGroups, initialize_model_parallel
from tests.megatron.streams_in_any_order import AnyOrder
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import ToyStage, toy_batches, toy_config

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
ON_HOST = replace(CONFIG, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True)
BF16 = torch.bfloat16


def _model(groups: ProcessGroups, stage: ToyStage) -> DistributedDataParallel:
    return DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), copy.deepcopy(stage), groups)


def _plain(groups: ProcessGroups, stage: ToyStage) -> DistributedOptimizer:
    return get_megatron_optimizer(CONFIG, _model(groups, stage), groups, cpu_ops())


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


def _state(optimizer: DistributedOptimizer) -> dict[str, torch.Tensor]:
    """Every element of the state by parameter, whatever parts it is kept in."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for shard in optimizer.param_shards():
        for key, tensor in shard.tensors.items():
            pieces.setdefault(f"{shard.name}.{key}", []).append((shard.start, tensor))
    return {name: torch.cat([tensor for _, tensor in sorted(of, key=lambda x: x[0])]) for name, of in pieces.items()}


def _assert_same(one: DistributedOptimizer, other: DistributedOptimizer) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = _state(one), _state(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("fraction", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_updates_are_the_plain_optimizers_bits(one_rank: ProcessGroups, fraction: float, dtype: torch.dtype) -> None:
    stage = ToyStage(toy_config(), range(9)).to(dtype)
    plain = _plain(one_rank, stage)
    config = replace(ON_HOST, optimizer_offload_fraction=fraction)
    hosted = get_megatron_optimizer(config, _model(one_rank, stage), one_rank, cpu_ops())
    streams = map(AnyOrder, itertools.count())
    shuffled = HybridDeviceOptimizer(
        config, _model(one_rank, stage), one_rank, cpu_ops(), chunk_size=128, make_streams=lambda *_: next(streams)
    )
    numel = plain.shards[0].numel
    assert sum(state.numel for state in shuffled.on_host) == pytest.approx(fraction * numel, abs=64)
    if fraction == 1:
        assert len(list(shuffled._chunks(shuffled.on_host[0], 128))) > 3 * NUM_SLOTS
    for seed in range(5):
        norm = _step(plain, seed)
        for optimizer in (hosted, shuffled):
            assert _step(optimizer, seed) == norm
            _assert_same(optimizer, plain)


def test_the_state_goes_on_from_the_plain_optimizers_and_back(one_rank: ProcessGroups) -> None:
    stage = ToyStage(toy_config(), range(3))
    config = replace(ON_HOST, optimizer_offload_fraction=0.5)
    plain, hosted = (
        _plain(one_rank, stage),
        HybridDeviceOptimizer(config, _model(one_rank, stage), one_rank, cpu_ops(), 64),
    )
    _step(plain, 0), _step(hosted, 0)
    hosted.offload()
    on_device = [item.tensor for state in hosted.on_device for item in (state.exp_avg, state.exp_avg_sq)]
    assert on_device
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in on_device)
    _assert_same(hosted, plain)  # its state can be read, and saved, wherever it is
    hosted.onload()
    fresh = HybridDeviceOptimizer(config, _model(one_rank, stage), one_rank, cpu_ops())
    fresh.load_state_dict(hosted.state_dict())
    fresh.model.load_state_dict(plain.model.state_dict())
    _step(plain, 1), _step(fresh, 1)
    _assert_same(fresh, plain)


def test_checkpoints_do_not_know_where_the_state_was(one_rank: ProcessGroups, tmp_path: Path) -> None:
    stage = ToyStage(toy_config(), range(3))
    plain = _plain(one_rank, stage)
    _step(plain, 0), _step(plain, 1)
    CheckpointSaver(one_rank).save(tmp_path / "plain", plain.model, plain, None, {})
    config = replace(ON_HOST, optimizer_offload_fraction=0.3)
    hosted = get_megatron_optimizer(config, _model(one_rank, stage), one_rank, cpu_ops())
    load_checkpoint(tmp_path / "plain", hosted.model, hosted, None, one_rank)
    _step(plain, 2), _step(hosted, 2)
    _assert_same(hosted, plain)
    hosted.offload()
    CheckpointSaver(one_rank).save(tmp_path / "hosted", hosted.model, hosted, None, {})
    fresh = _plain(one_rank, stage)
    load_checkpoint(tmp_path / "hosted", fresh.model, fresh, None, one_rank)
    _step(plain, 3), _step(fresh, 3)
    _assert_same(fresh, plain)


def test_moments_in_bfloat16_take_half_the_memory_and_follow(one_rank: ProcessGroups) -> None:
    stage = ToyStage(toy_config(), range(3))
    narrow = replace(
        CONFIG,
        use_precision_aware_optimizer=True,
        exp_avg_dtype=BF16,
        exp_avg_sq_dtype=BF16,
        main_grads_dtype=BF16,
        adam_beta2=0.98,
    )
    for is_hosted in (False, True):
        config = replace(narrow, optimizer_cpu_offload=is_hosted)
        optimizer = get_megatron_optimizer(config, _model(one_rank, stage), one_rank, cpu_ops())
        wide = get_megatron_optimizer(replace(CONFIG, adam_beta2=0.98), _model(one_rank, stage), one_rank, cpu_ops())
        for seed in range(3):
            _step(optimizer, seed), _step(wide, seed)
        (state,) = optimizer.shards
        assert [item.tensor.element_size() for item in state.tensors.values()] == [4, 2, 2]
        for got, want in zip(optimizer.model.parameters(), wide.model.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-2)  # a third of what three updates move
    with pytest.raises(ValueError, match="adam_beta2 is 0.999 with exp_avg_sq_dtype") as error:
        OptimizerConfig(exp_avg_sq_dtype=BF16, main_params_dtype=torch.float16, optimizer_offload_fraction=2)
    assert "main_params_dtype is torch.float16; it must be torch.float32" in str(error.value)
    assert "exp_avg_sq_dtype is torch.bfloat16; that needs use_precision_aware_optimizer" in str(error.value)
    assert "optimizer_offload_fraction is 2" in str(error.value)


def _two_replicas() -> None:
    groups = initialize_model_parallel()
    stage = ToyStage(toy_config(), range(3)).to(BF16)
    plain = _plain(groups, stage)
    hosted = HybridDeviceOptimizer(ON_HOST, _model(groups, stage), groups, cpu_ops(), chunk_size=64)
    for seed in range(3):
        assert _step(hosted, seed) == _step(plain, seed)
        _assert_same(hosted, plain)


def test_each_replica_updates_its_shard() -> None:
    run_ranks(_two_replicas, 2, timeout_s=60)
