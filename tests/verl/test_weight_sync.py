"""Weights by the plan between real engines: the bits of the checkpoint arrive, and a wrong bit stops every rank."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weight_source import fill
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.published import smollm2
from tests.vllm.fp8_tiny import WIDE
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.weight_sync.plan import build_plan
from verl.workers.weight_sync.sync import WeightSync
from vllm.model_executor.model_loader.digest import differences

BUCKET = 128 << 10


def params_of(path: str, layout: ParallelLayout, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A training rank's tensors, read from the checkpoint by the plan; nothing on a rank that does not train."""
    if rank >= layout.world_size:
        return {}
    hf, source, params = load_hf_config(path), HFCheckpoint(path), {}
    for tensor in local_plan(hf, layout, rank):
        params[tensor.name] = torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_buffer else dtype)
        fill(params[tensor.name], tensor, source)
    return params


def engine(path: str, settings: dict[str, Any]) -> vLLMRollout:
    config = RolloutConfig(
        prompt_length=16, response_length=16, max_num_seqs=4, num_gpu_blocks_override=16, enforce_eager=True, **settings
    )
    rollout = vLLMRollout(config, path, rollout_ops="vllm.ops.cpu:default_ops", device=torch.device("cpu"))
    rollout.resume(["weights"])
    return rollout


def sync_of(path: str, layout: ParallelLayout, dtype: torch.dtype, rollout: vLLMRollout, first: int) -> WeightSync:
    """`first`: the first rank that generates."""
    group = dist.group.WORLD
    assert group is not None
    hf, size = load_hf_config(path), group.size()
    shards = {rank: rollout.rank_shards(rank) for rank in range(first, size)}
    plan = build_plan(hf, layout, dtype, shards, size, bucket_bytes=BUCKET, ranks_per_node=2)
    return WeightSync(plan, shards.get(group.rank(), {}), group, torch.device("cpu"))


def synced(path: str, sizes: dict[str, Any], dtype_name: str, settings: dict[str, Any], first: int) -> dict[str, Any]:
    """Of this rank's engine: where two syncs differ from the tensors given whole, received / held bytes."""
    layout, dtype, rank = ParallelLayout.from_json(sizes), getattr(torch, dtype_name), dist.get_rank()
    rollout = engine(path, settings)
    params = params_of(path, layout, rank, dtype)
    sync = sync_of(path, layout, dtype, rollout, first)
    is_rollout = rank >= first
    for version in (1, 2):
        for tensor in params.values():
            tensor.mul_(1 if version == 2 else 2)
        sync.run(params, rollout if is_rollout else None, version)
    found = rollout.shard_digests() if is_rollout else {}
    assert not is_rollout or rollout.inference_engine.policy_version == 2
    rollout.inference_engine.update_weights(whole_weights(path, dtype).items(), 3)
    differing = differences(rollout.shard_digests(), found) if is_rollout else []
    received = sum(sum(round_.received_bytes) for round_ in sync.rounds)
    plan_says = sync.plan.traffic()
    assert plan_says.received[rank] <= received <= plan_says.received[rank] + 8 * len(sync.plan.transfers)
    return {"differences": differing, "received": int(plan_says.received[rank]), "held": int(plan_says.held[rank])}


def whole_weights(path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The trainer's weights after the first version's doubling."""
    source = HFCheckpoint(path)
    weights = {}
    for name in source.names():
        tensor = source.read(name)
        weights[name] = tensor * 2 if name.endswith("correction_bias") else tensor.to(dtype) * 2
    return weights


LATENT = tiny_hf_config(num_hidden_layers=4, num_nextn_predict_layers=1)
QWEN3 = tiny_qwen3_config(num_hidden_layers=4, tie_word_embeddings=True)
# config, world, training layout, dtype of the trainer, rollout, first rank that generates
CASES: dict[str, tuple[dict[str, Any], int, ParallelLayout, str, dict[str, Any], int]] = {
    "TP2 PP2 EP2 to DP2 TP2 EP4, bfloat16": (
        LATENT,
        4,
        ParallelLayout(4, 2, 2, expert_model_parallel_size=2),
        "bfloat16",
        {"tensor_model_parallel_size": 2, "dtype": "bfloat16"},
        0,
    ),
    "TP2 PP2 with split down-projections to TP2, float32": (
        LATENT,
        4,
        ParallelLayout(4, 2, 2, expert_tensor_parallel_size=2, mla_down_proj_column_parallel=True),
        "float32",
        {"tensor_model_parallel_size": 2, "dtype": "float32"},
        0,
    ),
    "two chunks to DP4, experts whole everywhere": (
        LATENT,
        4,
        ParallelLayout(4, 1, 2, expert_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        "float32",
        {"enable_expert_parallel": False, "dtype": "bfloat16"},
        0,
    ),
    "experts split over TP both ways": (
        LATENT,
        4,
        ParallelLayout(4, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
        "float32",
        {"tensor_model_parallel_size": 4, "enable_expert_parallel": False, "dtype": "float32"},
        0,
    ),
    "interleaved and tied to as many ranks as heads allow": (
        QWEN3,
        4,
        ParallelLayout(4, 2, 2),
        "float32",
        {"tensor_model_parallel_size": 4, "dtype": "bfloat16", "enable_expert_parallel": False},
        0,
    ),
    "FP8 on the way": (
        {**WIDE, "num_hidden_layers": 3},
        4,
        ParallelLayout(4, 2, 2, expert_model_parallel_size=2, num_layer_list=(2, 1)),
        "bfloat16",
        {"tensor_model_parallel_size": 2, "dtype": "bfloat16", "quantization": "fp8"},
        0,
    ),
    "shared experts in parts to whole ones": (
        LATENT,
        2,
        ParallelLayout(2, 2, expert_model_parallel_size=2),
        "float32",
        {
            "tensor_model_parallel_size": 2,
            "dtype": "float32",
            "expert_exchange": "dispatch",
            "use_sequence_parallel_moe": True,
        },
        0,
    ),
    "two ranks train, two others generate": (
        LATENT,
        4,
        ParallelLayout(2, 1, 2),
        "bfloat16",
        {"tensor_model_parallel_size": 2, "dtype": "bfloat16"},
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_engines_hold_the_trainer_s_weights(name: str, tmp_path: Path) -> None:
    config, world_size, layout, dtype, settings, first = CASES[name]
    write_tiny_checkpoint(tmp_path, config, seed=1, dtype=torch.float32)
    for rank, seen in enumerate(run_ranks(synced, world_size, str(tmp_path), asdict(layout), dtype, settings, first)):
        assert seen["differences"] == []
        assert (seen["received"] == 0) == (rank < first) and seen["received"] <= seen["held"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_hold_a_published_model() -> None:
    """SmolLM2 from two stages to two replicas and to three ranks of a replica, a key head on each."""
    for world_size, layout, tp in ((2, ParallelLayout(2, 1, 2), 1), (3, ParallelLayout(3, 3), 3)):
        settings = {"tensor_model_parallel_size": tp, "dtype": "bfloat16", "enable_expert_parallel": False}
        found = run_ranks(synced, world_size, str(smollm2()), asdict(layout), "float32", settings, 0, timeout_s=500)
        assert [seen["differences"] for seen in found] == [[]] * world_size


def flipped(path: str, sizes: dict[str, Any], num_flips: int) -> list[str]:
    """Flips random bits of random tensors of one engine, one at a time; those that were not found by name."""
    layout, rank = ParallelLayout.from_json(sizes), dist.get_rank()
    rollout = engine(path, {"tensor_model_parallel_size": 2, "dtype": "bfloat16"})
    params = params_of(path, layout, rank, torch.bfloat16)
    sync = sync_of(path, layout, torch.bfloat16, rollout, 0)
    sync.run(params, rollout, 1)
    generator = torch.Generator().manual_seed(0)  # the same choices everywhere
    sums = sync.sums_N
    missed = []
    for _ in range(num_flips):
        victim = int(torch.randint(dist.get_world_size(), (), generator=generator))
        draw = torch.randint(1 << 40, (3,), generator=generator).tolist()
        name = ""
        if rank == victim:
            name, part = shard_part(rollout, draw[0])
            flip(part, draw[1], draw[2])
        try:
            sync.check.require_equal(sums, rollout.shard_digests())
            missed.append(f"flip {draw} was not found")
        except RuntimeError as error:
            text = str(error)
            if f"rank {victim}'s rollout engine" not in text or text.count("  - ") != 1 or f"  - {name}" not in text:
                missed.append(text)
        if rank == victim:
            flip(part, draw[1], draw[2])
    sync.check.require_equal(sums, rollout.shard_digests())
    return missed


def shard_part(rollout: vLLMRollout, draw: int) -> tuple[str, Tensor]:
    views = rollout.inference_engine.core.worker.model.weight_views
    shards = [item for name, view in views.items() for item in view.shards(name)]
    name, shard = shards[draw % len(shards)]
    assert isinstance(shard.memory, Tensor)
    return name, shard.memory


def flip(part: Tensor, element: int, bit: int) -> None:
    """One bit of one element, in place."""
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(element % part.numel()), part.shape))
    bits = part.view({2: torch.int16, 4: torch.int32}[part.element_size()])
    bit %= 8 * part.element_size()
    one = torch.tensor(1).bitwise_left_shift(bit).to(bits.dtype)
    bits[index] = bits[index] ^ one


@pytest.mark.timeout(600)  # above that of the ranks, whose stacks are then told
@pytest.mark.parametrize("num_flips", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_found_and_named(num_flips: int, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, LATENT, seed=1, dtype=torch.float32)
    layout = ParallelLayout(2, 1, 2)
    assert run_ranks(flipped, 2, str(tmp_path), asdict(layout), num_flips, timeout_s=300) == [[], []]
