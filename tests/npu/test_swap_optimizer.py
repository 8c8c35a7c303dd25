"""The swap optimizer on the device: what it holds by the allocator's count, and the unswapped one's updates exactly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from mindspeed.core.optimizer.swap_optimizer import SwapOptimizer
from mindspeed.ops import train_ops
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.npu.device_memory import held_bytes
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import config_overrides, prompts
from tests.parallel.toy import toy_config
from tests.verl.test_upstream_scripts import script_arguments
from verl.trainer.command_line import read_command_line
from verl.trainer.config import load_config, validate_config
from verl.utils.import_utils import load_provider
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.row_store import worker_batch

WIDTH = 128
SWAP_TIMES = 8
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1)
DEVICE = torch.device("npu:0")
ENGINE = "actor_rollout_ref.actor.megatron"
SEEDS_KEY = f"{ENGINE}.override_transformer_config.swap_optimizer"
# What a tiny model on one die needs in place of the seed's sizes.
LARGE_SEEDS_KEYS = (
    *(
        f"actor_rollout_ref.{role}.megatron.{key}={value}"
        for role in ("actor", "ref")
        for key, value in (
            ("pipeline_model_parallel_size", 1),
            ("expert_model_parallel_size", 1),
            ("use_dist_checkpointing", False),
        )
    ),
    *(
        f"{ENGINE}.override_transformer_config.{key}=null"
        for key in (
            "pipeline_num_transformer_layers",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        )
    ),
    *(
        f"~{ENGINE}.override_transformer_config.{key}"  # the tiny model has other positions
        for key in ("rope_scaling_type", "yarn_scaling_factor", "rope_scaling_mscale", "rope_scaling_mscale_all_dim")
    ),
    f"{ENGINE}.optimizer_offload=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "trainer.nnodes=1",
)


def _model(groups: ProcessGroups, dtype: torch.dtype) -> DistributedDataParallel:
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return DistributedDataParallel(toy_config(), DistributedDataParallelConfig(), stack.to(DEVICE, dtype), groups)


def _plain(groups: ProcessGroups, dtype: torch.dtype) -> DistributedOptimizer:
    return get_megatron_optimizer(CONFIG, _model(groups, dtype), groups, train_ops())


def _swapped(groups: ProcessGroups, dtype: torch.dtype) -> SwapOptimizer:
    return SwapOptimizer(CONFIG, _model(groups, dtype), groups, train_ops(), swap_times=SWAP_TIMES)


def _step(optimizer: DistributedOptimizer, seed: int) -> tuple[float, int]:
    """One training step; the gradient norm, and the most bytes that the update took beside what was there."""
    generator = torch.Generator().manual_seed(seed)
    x_TH, target_TH = torch.randn(2, 6, WIDTH, generator=generator).to(DEVICE)
    optimizer.zero_grad()
    dtype = next(optimizer.model.parameters()).dtype
    (optimizer.model(x_TH.to(dtype)) - target_TH).square().sum().backward()
    finalize_model_grads(optimizer.model, optimizer.groups)
    before = held_bytes()
    torch.npu.reset_peak_memory_stats(DEVICE)
    is_updated, grad_norm, _ = optimizer.step()
    assert is_updated
    return grad_norm, int(torch.npu.max_memory_allocated(DEVICE)) - before


def _assert_same(one: DistributedOptimizer, other: DistributedOptimizer) -> None:
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key]).cpu()), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_between_steps_the_device_is_free_of_the_optimizers_size(groups: ProcessGroups, dtype: torch.dtype) -> None:
    held = [held_bytes()]
    models = [_model(groups, dtype) for _ in range(2)]
    held.append(held_bytes())
    plain = get_megatron_optimizer(CONFIG, models[0], groups, train_ops())
    held.append(held_bytes())
    torch.npu.reset_peak_memory_stats(DEVICE)
    swapped = SwapOptimizer(CONFIG, models[1], groups, train_ops(), swap_times=SWAP_TIMES)
    assert torch.npu.max_memory_allocated(DEVICE) == held[-1]  # not even while it is made
    (state,) = swapped.shards
    state_bytes = 12 * state.buffer.param_shard.numel()
    assert state_bytes > 12 * 2 * WIDTH**2
    beside_params = state_bytes if dtype == torch.bfloat16 else state_bytes * 2 // 3  # fp32 ones are their own masters
    assert held[2] - held[1] == pytest.approx(beside_params, rel=0.01)
    assert all(item.tensor.is_pinned() for item in state.tensors.values())

    _step(plain, 0), _step(swapped, 0)
    between = held_bytes()
    _, step_bytes = _step(swapped, 1)
    _step(plain, 1)
    assert held_bytes() == between == pytest.approx(held[2], abs=16384)  # the gradients' clips and norms are small
    in_chunks = state_bytes / SWAP_TIMES
    assert in_chunks <= step_bytes < 1.25 * in_chunks + 8192  # and the kernel's workspace
    _assert_same(swapped, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_equal_bit_for_bit(groups: ProcessGroups, dtype: torch.dtype) -> None:
    plain, swapped, fresh = _plain(groups, dtype), _swapped(groups, dtype), _swapped(groups, dtype)
    for seed in range(4):
        assert _step(swapped, seed)[0] == _step(plain, seed)[0]
        _assert_same(swapped, plain)

    # Either goes on from the other's checkpoint.
    fresh.load_state_dict(plain.state_dict())
    fresh.model.load_state_dict(plain.model.state_dict())
    plain.load_state_dict(swapped.state_dict())
    assert _step(fresh, 9)[0] == _step(plain, 9)[0]
    _assert_same(fresh, plain)


def test_the_key_of_the_seeds_leaves_no_optimizer_state_on_the_die_between_steps(groups: ProcessGroups) -> None:
    """``override_transformer_config.swap_optimizer``, as r1_ascend's script gives it."""
    on_die, beside_model, alive = {}, {}, []
    for is_given in (False, True):
        engine = load_config([f"+{SEEDS_KEY}=True"] if is_given else []).actor_rollout_ref.actor.megatron
        model = _model(groups, torch.bfloat16)
        before = held_bytes()
        optimizer = load_provider(engine.optimizer_provider)(CONFIG, model, groups, train_ops())
        for seed in range(2):
            _step(optimizer, seed)
        alive.append(optimizer)  # so that the other's count begins with this one
        state = [item.current for shard in optimizer.shards for item in shard.tensors.values()]
        on_die[is_given] = sum(tensor.nbytes for tensor in state if tensor.is_npu)
        beside_model[is_given] = held_bytes() - before
    assert on_die == {False: 12 * optimizer.shards[0].buffer.param_shard.numel(), True: 0}
    assert beside_model[False] - beside_model[True] == pytest.approx(on_die[False], abs=16384)  # by the allocator
    assert beside_model[True] < 16384


def _steps_of_a_worker(model_dir: str, overrides: list[str]) -> list[tuple[int, int]]:
    """(bytes of optimizer state on the die, all bytes on it) behind each of two steps of a worker."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    config = load_config([*overrides, *config_overrides(model_dir, 1), *LARGE_SEEDS_KEYS, "trainer.device=npu"])
    assert validate_config(config) == []
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref")
    worker.init_model()
    found = []
    for step in (1, 2):
        batch = worker.generate_sequences(prompts())
        batch.meta_info = {"temperature": 1.0, "rollout_n": 2, "global_step": step}
        batch = batch.union(worker.compute_ref_log_prob(worker_batch(batch)))
        batch.batch["advantages"] = batch.batch["response_mask"].float()
        worker.update_actor(worker_batch(batch, "advantages"))
        items = [item for shard in worker.optimizer.shards for item in shard.tensors.values()]
        found.append((sum(item.device_bytes for item in items), held_bytes()))
    assert items and sum(item.current.nbytes for item in items) > 0
    return found


@pytest.mark.timeout(240)
def test_r1_ascends_command_leaves_no_optimizer_state_on_the_die_of_a_worker(tmp_path: Path) -> None:
    """The script's own overrides through the command line to a worker, with a tiny model and one die for its sizes."""
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    seed = list(read_command_line(script_arguments("seed_r1_ascend")).overrides)
    assert [text for text in seed if "swap_optimizer" in text] == [f"+{SEEDS_KEY}=True"]
    (swapped,) = run_ranks(_steps_of_a_worker, 1, str(tmp_path), seed, device="npu")
    without = [text for text in seed if "swap_optimizer" not in text]
    (plain,) = run_ranks(_steps_of_a_worker, 1, str(tmp_path), without, device="npu")
    assert [state for state, _ in swapped] == [0, 0]
    assert all(state > 0 for state, _ in plain)
    for (state, held), (_, held_swapped) in zip(plain, swapped, strict=True):
        assert held - held_swapped == pytest.approx(state, rel=0.02)  # by the allocator's count
