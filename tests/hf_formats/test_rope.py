"""Rotary positions of both engines against transformers' DeepSeek-V3, for every way of giving YaRN's mscales."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_formats.config import load_hf_config
from hf_formats.rope import RopeConfig
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.transformer.rotary import RotaryEmbedding, attention_scale
from megatron.core.transformer.transformer_config import MLATransformerConfig
from mindspeed_llm.model import to_transformer_config
from tests.mindspeed_llm.tiny import tiny_hf_config
from vllm.model_executor.layers.rotary_embedding import RotaryTable
from vllm.transformers_utils.config import load_config

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
VALUES = (None, 0, 1, 0.707)  # None: the key is absent
LENGTH = 200


def both_engines(model_dir: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
    """(cos, sin, softmax scale) of the model in either engine, cos and sin [T, R/2]."""
    config = to_transformer_config(load_hf_config(model_dir), params_dtype=torch.float32, layout=ParallelLayout())
    assert isinstance(config, MLATransformerConfig)
    hf, positions = load_config(str(model_dir)), torch.arange(LENGTH)
    table = RotaryTable(hf.rope, hf.rope_dim, LENGTH, torch.device("cpu"))
    half = hf.rope_dim // 2
    return {
        "training": (*RotaryEmbedding(config)(positions), attention_scale(config)),
        "rollout": (table.cos[:, :half], table.sin[:, :half], hf.rope.softmax_scale(hf.qk_head_dim)),
    }


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), list(itertools.product(VALUES, VALUES)))
def test_amplitude_and_softmax_scale_equal_transformers(
    mscale: float | None, mscale_all_dim: float | None, tmp_path: Path
) -> None:
    from transformers import DeepseekV3Config as TransformersConfig
    from transformers import DeepseekV3ForCausalLM

    given = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    scaling: dict[str, Any] = YARN | {key: value for key, value in given.items() if value is not None}
    raw = tiny_hf_config(rope_scaling=scaling, max_position_embeddings=163840, qk_rope_head_dim=64, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = DeepseekV3ForCausalLM(TransformersConfig.from_pretrained(tmp_path)).model
    cos, sin = model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])
    half = cos.shape[-1] // 2
    for engine, (cos_TR, sin_TR, scale) in both_engines(tmp_path).items():
        torch.testing.assert_close(cos_TR, cos[0, :, :half], msg=f"{engine}: cos", rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(sin_TR, sin[0, :, :half], msg=f"{engine}: sin", rtol=2e-6, atol=2e-5)
        assert cos_TR[0, 0].item() == pytest.approx(cos[0, 0, 0].item(), rel=1e-7), engine
        assert scale == pytest.approx(model.layers[0].self_attn.scaling, rel=1e-12), engine


@pytest.mark.parametrize("scaling", [None, YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}])
def test_both_engines_rotate_by_the_same_bits(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(rope_scaling=scaling)))
    training, rollout = both_engines(tmp_path).values()
    assert torch.equal(training[0], rollout[0]) and torch.equal(training[1], rollout[1])
    assert training[2] == rollout[2]


def test_a_context_that_is_not_stretched_has_no_amplitude() -> None:
    assert RopeConfig(rope_type="yarn", factor=1.0, mscale=0.707).amplitude == 1.0
