"""config.json is read with every problem at once and turned into the training engine's config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_config import load_hf_config, parse_hf_config, to_transformer_config, without_quantisation_and_mtp
from tests.mindspeed_llm.tiny import tiny_hf_config


def test_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    hf = load_hf_config(tmp_path)
    assert hf.qk_head_dim == 24
    assert [hf.is_moe_layer(layer) for layer in range(3)] == [False, True, True]
    assert hf.rope_scaling is not None
    assert hf.rope_scaling.factor == 4
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
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        parse_hf_config(tiny_hf_config(model_type="llama"))
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_hf_config(tmp_path)


def test_config_as_transformers_5_saves_it() -> None:
    raw = tiny_hf_config()
    scaling = raw.pop("rope_scaling")
    raw["rope_parameters"] = {**scaling, "rope_type": "yarn", "rope_theta": raw.pop("rope_theta")}
    raw["dtype"] = raw.pop("torch_dtype")
    assert parse_hf_config(raw) == parse_hf_config(tiny_hf_config())


def test_v2_like_config_has_softmax_router_without_bias() -> None:
    raw = tiny_hf_config(model_type="deepseek_v2", q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False)
    del raw["topk_method"], raw["scoring_func"]
    hf = parse_hf_config(raw)
    assert (hf.scoring_func, hf.topk_method, hf.has_expert_bias) == ("softmax", "greedy", False)
    config = to_transformer_config(hf, params_dtype=torch.float32, layout=ParallelLayout())
    assert config.q_lora_rank is None
    assert config.moe_router_pre_softmax
    assert config.moe_router_num_groups is None


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
