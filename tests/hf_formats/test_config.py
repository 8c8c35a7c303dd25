"""config.json is read with every problem at once and turned into the training engine's config."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import HFModelConfig, load_hf_config, parse_hf_config, without_quantisation_and_mtp
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.model import to_transformer_config
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config
from vllm.transformers_utils.config import load_config


def test_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    hf = load_hf_config(tmp_path)
    assert hf.qk_head_dim == 24
    assert [hf.is_moe_layer(layer) for layer in range(3)] == [False, True, True]
    assert (hf.rope.rope_type, hf.rope.factor) == ("yarn", 4)
    assert hf.has_expert_bias


def test_every_problem_is_listed() -> None:
    raw = tiny_hf_config(hidden_size=0, n_group=3, tie_word_embeddings=True, torch_dtype="int8", moe_layer_freq=0)
    del raw["kv_lora_rank"], raw["rope_scaling"]["factor"]
    with pytest.raises(ValueError, match="problem") as error:
        parse_hf_config(raw, source="here/config.json")
    for part in ("here/config.json", "hidden_size is 0", "kv_lora_rank is missing", "n_group 3", "tie_word_embeddings"):
        assert part in str(error.value)
    for part in ("int8", "moe_layer_freq", "rope_scaling.factor"):
        assert part in str(error.value)


def test_unknown_architecture_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: deepseek_v3, deepseek_v2, qwen3"):
        parse_hf_config(tiny_hf_config(model_type="mamba"))
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("load", [load_hf_config, load_config], ids=["training", "rollout"])
def test_an_unknown_family_is_refused_with_those_that_exist(
    load: Callable[[str], HFModelConfig], tmp_path: Path
) -> None:
    mamba, supported = "model_type 'mamba'", "is not supported; supported: deepseek_v3, deepseek_v2, qwen3"
    for family, message in (
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, f"config.json: {mamba} {supported}"),
        ({"architectures": ["MambaForCausalLM"]}, f"architecture 'MambaForCausalLM' without a model_type {supported}"),
        ({}, f"architecture None without a model_type {supported}"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen2ForCausalLM"]},
            "architecture 'Qwen2ForCausalLM' is not supported; model_type 'qwen3' is supported as Qwen3ForCausalLM",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64} | family))
        with pytest.raises(ValueError) as error:
            load(str(tmp_path))
        assert message in str(error.value) and "missing" not in str(error.value)


def test_a_family_may_be_given_by_its_architecture_alone() -> None:
    raw = tiny_hf_config()
    del raw["model_type"]
    assert parse_hf_config(raw) == parse_hf_config(tiny_hf_config())


def test_config_as_transformers_5_saves_it() -> None:
    raw = tiny_hf_config()
    scaling = raw.pop("rope_scaling")
    raw["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": raw.pop("rope_theta")}
    raw["dtype"] = raw.pop("torch_dtype")
    assert parse_hf_config(raw) == parse_hf_config(tiny_hf_config())


def test_v2_like_config_has_softmax_router_without_bias() -> None:
    raw = tiny_hf_config(model_type="deepseek_v2", q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False)
    del raw["topk_method"], raw["scoring_func"], raw["architectures"]
    hf = parse_hf_config(raw)
    assert (hf.scoring_func, hf.topk_method, hf.has_expert_bias) == ("softmax", "greedy", False)
    config = to_transformer_config(hf, params_dtype=torch.float32, layout=ParallelLayout())
    assert config.q_lora_rank is None
    assert config.moe_router_pre_softmax
    assert config.moe_router_num_groups is None


QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_8B = QWEN3_0_6B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
QWEN2_5_0_5B = QWEN3_0_6B | {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": None,
}
LLAMA_3_1_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


@pytest.mark.parametrize(
    ("raw", "num_params"),
    [
        (QWEN3_0_6B, 596_049_920),
        (QWEN3_8B, 8_190_735_360),
        (QWEN2_5_0_5B, 494_032_768),
        (LLAMA_3_1_8B, 8_030_261_248),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
    ],
)
def test_published_models_have_their_published_sizes(raw: dict[str, Any], num_params: int) -> None:
    assert sum(math.prod(shape) for shape, _ in hf_tensors(parse_hf_config(raw)).values()) == num_params


def test_qwen3_is_grouped_query_attention_without_experts() -> None:
    hf = parse_hf_config(QWEN3_0_6B)
    assert not hf.is_mla and not any(hf.is_moe_layer(layer) for layer in range(28))
    config = to_transformer_config(hf, params_dtype=torch.float32, layout=ParallelLayout())
    assert not config.multi_latent_attention and config.num_moe_experts is None
    assert (config.query_groups, config.head_size, config.qk_layernorm) == (8, 128, True)
    assert config.share_embeddings_and_output_weights


def test_every_problem_of_a_qwen3_is_listed() -> None:
    raw = tiny_qwen3_config(
        num_key_value_heads=3, head_dim=7, use_sliding_window=True, rope_scaling={"rope_type": "yarn", "factor": 4.0}
    )
    with pytest.raises(ValueError, match="has 4 problem") as error:
        parse_hf_config(raw)
    for part in ("num_key_value_heads 3", "head_dim is 7", "use_sliding_window", "rope_scaling.original_max"):
        assert part in str(error.value)


def test_more_prediction_layers_than_the_checkpoint_has() -> None:
    hf = parse_hf_config(tiny_hf_config(num_nextn_predict_layers=1))
    assert (hf.mtp_num_layers, hf.with_mtp(1).mtp_num_layers) == (0, 1)
    with pytest.raises(ValueError, match="num_nextn_predict_layers 1"):
        hf.with_mtp(2)


def test_quantisation_and_mtp_are_cut_out_and_nothing_else() -> None:
    raw = tiny_hf_config(num_nextn_predict_layers=1, quantization_config={"quant_method": "fp8"})
    assert without_quantisation_and_mtp(raw) == tiny_hf_config()
    assert raw["num_nextn_predict_layers"] == 1


def test_transformer_config() -> None:
    layout = ParallelLayout(world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2)
    config = to_transformer_config(
        parse_hf_config(tiny_hf_config()),
        params_dtype=torch.bfloat16,
        layout=layout,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert config.sequence_parallel
    assert config.recompute_granularity == "full"
    assert (config.qk_head_dim, config.qk_pos_emb_head_dim) == (16, 8)
    assert config.moe_layer_freq == (0, 1, 1)
    assert (config.mscale, config.mscale_all_dim, config.rotary_scaling_factor) == (1.0, 1.0, 4.0)
