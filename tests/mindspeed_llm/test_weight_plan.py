"""The plan covers every element of the model exactly once per replica, in every layout and naming."""

from __future__ import annotations

import math
import time

import pytest

from hf_formats.config import HFModelConfig, parse_hf_config
from hf_formats.ranges import Ranges, shape_of
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import rank_file, shard_layout
from mindspeed_llm.weight_plan import NAMINGS, Naming, local_plan, model_shards, plan_problems
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config

DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
}
LAYOUTS = {
    "one": ParallelLayout(),
    "dp2": ParallelLayout(world_size=2),
    "tp2 pp2 ep4 extended": shard_layout(2, 2, 2, tp_extend_ep=True, num_layer_list=(2, 1)),
    "tp2 ep2 experts split": shard_layout(2, 1, 2, tp_extend_ep=False),
    "pp3 ep4 edp2": ParallelLayout(world_size=24, pipeline_model_parallel_size=3, expert_model_parallel_size=4),
    "tp2 pp2 etp2, down-projections split": ParallelLayout(
        world_size=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_tensor_parallel_size=2,
        num_layer_list=(1, 2),
        mla_down_proj_column_parallel=True,
    ),
    "tp4 ep1": ParallelLayout(world_size=4, tensor_model_parallel_size=4),
    "pp2 of two chunks, a slot without a layer, cp2 ep2": ParallelLayout(
        world_size=4,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        noop_layers=(1,),
    ),
    "tp2 cp2, experts over etp2 ep2 edp2": ParallelLayout(
        world_size=8,
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=2,
    ),
}


def tiny(**overrides: object) -> HFModelConfig:
    return parse_hf_config(tiny_hf_config(**overrides))


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_each_element_is_owned_once_per_replica(layout: ParallelLayout, naming: Naming) -> None:
    hf = tiny()
    owners: dict[str, dict[Ranges, int]] = {}
    for rank in range(layout.world_size):
        for tensor in local_plan(hf, layout, rank, naming):
            filled = sum(math.prod(shape_of(shard.local_ranges)) for shard in tensor.shards)
            assert filled == tensor.num_elements, tensor.name
            for shard in tensor.shards:
                counts = owners.setdefault(shard.hf_name, {})
                counts[shard.ranges] = counts.get(shard.ranges, 0) + 1
    for name, (shape, _) in hf_tensors(hf).items():
        assert sum(math.prod(shape_of(part)) for part in owners[name]) == math.prod(shape), name
        assert len(set(owners[name].values())) == 1, f"{name}: shards have different numbers of owners"
        is_expert = ".experts." in name
        dense_replicas = layout.data_parallel_size * layout.context_parallel_size
        replicas = layout.expert_data_parallel_size if is_expert else dense_replicas
        is_split = is_expert or len(owners[name]) > 1
        tp = 1 if is_split else layout.tensor_model_parallel_size
        assert set(owners[name].values()) == {replicas * tp}, name


def test_model_shards_name_the_lowest_owner() -> None:
    hf, layout = tiny(), LAYOUTS["pp3 ep4 edp2"]
    lowest: dict[tuple[str, object], int] = {}
    for rank in range(layout.world_size):
        for tensor in local_plan(hf, layout, rank):
            for shard in tensor.shards:
                lowest.setdefault((shard.hf_name, shard.ranges), rank)
    found = {(name, shard.ranges): shard.rank for name, shards in model_shards(hf, layout).items() for shard in shards}
    assert found == lowest


def test_core_names_and_shapes() -> None:
    hf, layout = tiny(), shard_layout(2, 2, 2, tp_extend_ep=True, num_layer_list=(2, 1))
    first = {tensor.name: tensor for tensor in local_plan(hf, layout, 1)}
    assert first["embedding.word_embeddings.weight"].shape == (64, 64)
    assert first["decoder.layers.0.mlp.linear_fc1.weight"].shape == (128, 64)
    assert first["decoder.layers.1.self_attention.linear_q_up_proj.weight"].shape == (48, 32)
    assert first["decoder.layers.1.mlp.experts.weight1"].shape == (2, 64, 64)
    assert first["decoder.layers.1.mlp.experts.weight2"].shape == (2, 32, 64)
    assert first["decoder.layers.1.mlp.router.expert_bias"].is_buffer
    assert first["decoder.layers.1.mlp.router.expert_bias"].dtype == "float32"
    assert "output_layer.weight" not in first
    last = {tensor.name: tensor for tensor in local_plan(hf, layout, 7)}
    assert last["output_layer.weight"].shards[0].ranges == ((64, 128), (0, 64))
    assert last["decoder.layers.0.input_layernorm.weight"].shards[0].hf_name == "model.layers.2.input_layernorm.weight"
    assert last["decoder.layers.0.mlp.experts.weight1"].shards[0].hf_name.startswith("model.layers.2.mlp.experts.6.")


def test_extended_slot_is_ep_times_tp_plus_tp() -> None:
    hf, layout = tiny(), shard_layout(2, 1, 2, tp_extend_ep=True)
    for rank in range(4):
        coords = layout.coords(rank)
        assert rank_file(layout, coords) == f"iter_0000001/mp_rank_{coords.tp:02d}_{coords.dp:03d}/model_optim_rng.pt"
        plan = {tensor.name: tensor for tensor in local_plan(hf, layout, rank, "mindspeed_llm")}
        weight = plan["decoder.layers.1.mlp.experts.weight1"]
        slot = coords.dp * 2 + coords.tp
        assert weight.shards[0].hf_name == f"model.layers.1.mlp.experts.{slot * 2}.gate_proj.weight"
        assert weight.file_shape == (64, 2 * 64)


def test_split_experts_interleave_gate_and_up_by_tp_chunk() -> None:
    hf, layout = tiny(), shard_layout(2, 1, 2, tp_extend_ep=False)
    plan = {tensor.name: tensor for tensor in local_plan(hf, layout, 3, "mindspeed_llm")}
    weight = plan["decoder.layers.1.mlp.experts.weight1"]
    assert weight.shape == (4, 64, 32)
    gate, up = weight.shards[:2]
    assert gate.hf_name == "model.layers.1.mlp.experts.4.gate_proj.weight"
    assert (gate.ranges, gate.local_ranges) == (((16, 32), (0, 64)), ((0, 1), (0, 64), (0, 16)))
    assert (up.ranges, up.local_ranges) == (((16, 32), (0, 64)), ((0, 1), (0, 64), (16, 32)))


def test_without_q_lora() -> None:
    names = {tensor.name for tensor in local_plan(tiny(q_lora_rank=None), ParallelLayout(), 0)}
    assert "decoder.layers.0.self_attention.linear_q_proj.weight" in names
    assert not any("linear_q_down_proj" in name or "q_layernorm" in name for name in names)


def test_chunks_count_their_layers_and_files_keep_holes() -> None:
    hf = tiny(num_hidden_layers=6)
    layout = ParallelLayout(
        world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, noop_layers=(0, 5)
    )

    def layers(naming: Naming) -> dict[str, str]:
        end = ".input_layernorm.weight"
        plan = local_plan(hf, layout, 0, naming)
        return {
            tensor.name.removesuffix(end): tensor.shards[0].hf_name.removesuffix(end)
            for tensor in plan
            if tensor.name.endswith(end)
        }

    # Stage 0 has slots 0, 1 and 4, 5 of 8.
    first, second = "model.layers.0", "model.layers.3"
    assert layers("core") == {"chunks.0.decoder.layers.0": first, "chunks.1.decoder.layers.0": second}
    assert layers("mindspeed_llm") == {"chunks.0.decoder.layers.1": first, "chunks.1.decoder.layers.0": second}


def test_groups_of_query_heads_follow_one_another() -> None:
    hf, layout = parse_hf_config(tiny_qwen3_config()), ParallelLayout(world_size=2, tensor_model_parallel_size=2)
    plan = {tensor.name: tensor for tensor in local_plan(hf, layout, 1)}
    qkv = plan["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert qkv.shape == (4 * 24, 64)  # two heads of queries, one of keys, one of values
    names = [(shard.hf_name.rsplit(".", 2)[1], shard.ranges[0], shard.local_ranges[0]) for shard in qkv.shards]
    assert names == [("q_proj", (48, 96), (0, 48)), ("k_proj", (24, 48), (48, 72)), ("v_proj", (24, 48), (72, 96))]
    assert plan["decoder.layers.2.self_attention.q_layernorm.weight"].shape == (24,)
    tied = parse_hf_config(tiny_qwen3_config(tie_word_embeddings=True))
    assert "lm_head.weight" not in hf_tensors(tied)
    assert "output_layer.weight" not in {tensor.name for tensor in local_plan(tied, layout, 1)}
    four = ParallelLayout(world_size=4, tensor_model_parallel_size=4)
    plan = {tensor.name: tensor for tensor in local_plan(hf, four, 1)}
    qkv = plan["decoder.layers.2.self_attention.linear_qkv.weight"]
    found = [(shard.hf_name.rsplit(".", 2)[1], shard.ranges[0], shard.local_ranges[0]) for shard in qkv.shards]
    assert found == [("k_proj", (0, 24), (0, 24)), ("v_proj", (0, 24), (24, 48))]  # the second half of the first group
    three = ParallelLayout(world_size=3, tensor_model_parallel_size=3)
    assert "num_key_value_heads 2 neither divides over tensor_model_parallel_size 3 nor divides it" in plan_problems(
        hf, three
    )


def test_all_layout_problems_at_once() -> None:
    layout = ParallelLayout(
        world_size=6, tensor_model_parallel_size=3, pipeline_model_parallel_size=2, expert_model_parallel_size=3
    )
    problems = "\n".join(plan_problems(tiny(), layout))
    for part in ("attention heads", "vocabulary", "8 experts", "3 layers", "intermediate_size 128"):
        assert part in problems
    with pytest.raises(ValueError, match="does not fit the model"):
        local_plan(tiny(), layout, 0)


def test_671b_on_256_dies_matches_the_published_figures() -> None:
    start = time.perf_counter()
    hf = tiny(**DEEPSEEK_V3)
    layout = shard_layout(4, 8, 8, tp_extend_ep=True, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7))
    plans = [local_plan(hf, layout, rank) for rank in range(layout.world_size)]
    assert len(plans) == 256
    covered = sum(math.prod(shape_of(shard.ranges)) for parts in model_shards(hf, layout).values() for shard in parts)
    assert covered == 671_026_419_200
    per_stage = [sum(tensor.num_elements for tensor in plans[stage * 32]) for stage in range(8)]
    assert [round(count / 1e9, 2) for count in per_stage] == [2.40, 2.96, 3.39, 3.39, 3.39, 3.39, 3.39, 3.19]
    assert round(sum(tensor.num_bytes for tensor in plans[64]) / 2**30, 1) == 6.3
    experts = sum(tensor.num_elements for tensor in plans[64] if tensor.is_expert)
    assert experts == 8 * 8 * 44_040_192
    assert time.perf_counter() - start < 30
