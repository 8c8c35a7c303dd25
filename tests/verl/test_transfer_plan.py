"""The plan of a weight sync: every element once, from a rank that owns it, near first, in rounds that fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_formats.config import parse_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.sharded_checkpoint import shard_layout
from mindspeed_llm.weight_plan import owner_ranks
from tests.mindspeed_llm.test_weight_plan import DEEPSEEK_V3, LAYOUTS
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config
from tests.vllm.fp8_tiny import WIDE
from verl.workers.weight_sync.plan import TransferPlan, aligned, build_plan
from verl.workers.weight_sync.rank_rounds import rank_rounds
from vllm.config import ParallelConfig
from vllm.model_executor.model_loader.rank_shards import RankShards, rank_shards
from vllm.transformers_utils.config import load_config

BUCKET = 64 << 10


def rank_shards_of(
    config: dict[str, Any],
    folder: Path,
    sizes: tuple[int, int, bool],
    world_size: int,
    quantization: str | None = None,
    first_rank: int = 0,
) -> dict[int, RankShards]:
    """The bf16 shards of each rank of the engines; `sizes` are TP, DP, and whether experts are split over both."""
    (folder / "config.json").write_text(json.dumps(config))
    hf, (tp, dp, has_ep) = load_config(str(folder)), sizes
    return {
        first_rank + rank: rank_shards(
            hf, ParallelConfig(tp, dp, has_ep, rank, world_size), torch.bfloat16, quantization
        )
        for rank in range(world_size)
    }


def check(
    plan: TransferPlan, config: dict[str, Any], layout: ParallelLayout, rollout_shards: Mapping[int, RankShards]
) -> None:
    """Check coverage, source ranks, rounds and both sides of every message."""
    hf = parse_hf_config(config)
    left = {
        (rank, name): np.ones([stop - start for start, stop in shard.ranges], dtype=np.int8)
        for rank, shards in rollout_shards.items()
        for name, shard in shards.items()
    }
    for transfer in plan.transfers:
        source_ranks = set(owner_ranks(hf, layout, transfer.shard))
        for source, destination in zip(
            transfer.pairs.sources_D.tolist(), transfer.pairs.destinations_D.tolist(), strict=True
        ):
            assert source in source_ranks and (destination not in source_ranks or source == destination)
            shard = rollout_shards[destination][transfer.hf_name]
            here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(transfer.ranges, shard.ranges, strict=True))
            left[destination, transfer.hf_name][here] -= 1
    assert all((counts == 0).all() for counts in left.values())
    rounds = {rank: rank_rounds(plan, rank) for rank in range(plan.num_ranks)}
    for rank, mine in rounds.items():
        assert len(mine) == plan.num_rounds
        for index, round_ in enumerate(mine):
            assert max(sum(round_.sent_bytes), sum(round_.received_bytes)) <= BUCKET // 2
            assert sum(aligned(transfer.num_bytes) for transfer, _ in round_.received) == sum(round_.received_bytes)
            assert round_.received_bytes == [rounds[peer][index].sent_bytes[rank] for peer in range(plan.num_ranks)]


ROLLOUTS = [(1, 1, False), (2, 1, True), (2, 2, True), (1, 4, True), (4, 1, False)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["deepseek_v3", "tied qwen3", "fp8"])
def test_every_element_comes_once_from_an_owner(name: str, kind: str, tmp_path: Path) -> None:
    config = {
        "deepseek_v3": tiny_hf_config(vocab_size=96, num_nextn_predict_layers=1),
        "tied qwen3": tiny_qwen3_config(tie_word_embeddings=True, num_key_value_heads=4, vocab_size=96),
        "fp8": {**WIDE, "num_hidden_layers": 3},
    }[kind]
    layout = LAYOUTS[name]
    if kind == "tied qwen3" and layout.expert_model_parallel_size > 1:
        layout = ParallelLayout(layout.world_size, layout.tensor_model_parallel_size)
    for tp, dp, has_ep in ROLLOUTS:
        world_size = tp * dp * (2 if name == "one" else 1)  # also several instances
        num_ranks = max(world_size, layout.world_size)
        quantization = "fp8" if kind == "fp8" else None
        sizes = (tp, dp, has_ep)
        rollout_shards = rank_shards_of(config, tmp_path, sizes, world_size, quantization, num_ranks - world_size)
        plan = build_plan(
            parse_hf_config(config),
            layout,
            torch.float32,
            rollout_shards,
            num_ranks,
            bucket_bytes=BUCKET,
            ranks_per_node=2,
        )
        check(plan, config, layout, rollout_shards)


def test_what_the_trainer_lacks_is_named_before_anything_moves(tmp_path: Path) -> None:
    config = tiny_hf_config(n_routed_experts=8)
    rollout_shards = rank_shards_of(tiny_hf_config(n_routed_experts=12), tmp_path, (1, 1, False), 1)
    with pytest.raises(ValueError, match=r"training ranks hold 0 elements of model\.layers\.1\.mlp\.experts\.8\."):
        build_plan(
            parse_hf_config(config),
            ParallelLayout(),
            torch.float32,
            rollout_shards,
            1,
            bucket_bytes=BUCKET,
            ranks_per_node=1,
        )
    with pytest.raises(ValueError, match="update_weights_bucket_megabytes"):
        build_plan(
            parse_hf_config(config),
            ParallelLayout(),
            torch.float32,
            rank_shards_of(config, tmp_path, (1, 1, False), 1, first_rank=1),
            2,
            bucket_bytes=256,
            ranks_per_node=1,
        )


def test_near_source_ranks_first_and_in_turns(tmp_path: Path) -> None:
    config, layout = tiny_hf_config(), ParallelLayout(world_size=8, tensor_model_parallel_size=2)
    rollout_shards = rank_shards_of(config, tmp_path, (1, 1, False), 8, first_rank=8)  # ranks of their own
    kwargs: dict[str, Any] = {"bucket_bytes": 1 << 20}
    hf = parse_hf_config(config)
    plan = build_plan(hf, layout, torch.bfloat16, rollout_shards, 16, ranks_per_node=16, **kwargs)
    sent = plan.traffic().sent
    assert sent[8:].max() == 0 and sent[:8].max() < 1.3 * sent[:8].mean()
    mixed = {rank * 2: shards for rank, shards in enumerate(rollout_shards.values())}
    plan = build_plan(hf, layout, torch.bfloat16, mixed, 16, ranks_per_node=4, **kwargs)
    for transfer in plan.transfers:
        source_ranks = {rank // 4 for rank in owner_ranks(hf, layout, transfer.shard)}
        for source, destination in zip(transfer.pairs.sources_D, transfer.pairs.destinations_D, strict=True):
            assert source // 4 == destination // 4 or destination // 4 not in source_ranks


def test_671b_on_256_ranks_moves_what_they_hold(tmp_path: Path) -> None:
    config = {**tiny_hf_config(), **DEEPSEEK_V3, "rope_scaling": None}
    hf = parse_hf_config(config)
    layout = shard_layout(4, 8, 8, tp_extend_ep=True, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7))
    rollout_shards = rank_shards_of(config, tmp_path, (2, 128, True), 256)
    plan = build_plan(hf, layout, torch.bfloat16, rollout_shards, 256, bucket_bytes=512 << 20, ranks_per_node=16)
    traffic = plan.traffic()
    assert (traffic.expert_held == 58 * 3 * 7168 * 2048 * 2).all()  # one expert of each layer
    assert traffic.expert_received.max() <= 5.2e9
    assert (traffic.received <= traffic.held).all()
    assert traffic.sent.max() < 1.5 * traffic.sent.mean()
    assert any(len(transfer.pairs.receivers_R) < len(transfer.pairs.destinations_D) for transfer in plan.transfers)
    assert plan.num_rounds < 1.2 * traffic.sent.max() / (256 << 20)
