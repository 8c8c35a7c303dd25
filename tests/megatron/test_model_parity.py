"""The model against transformers' DeepseekV3ForCausalLM with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig
from tests.megatron.model_helpers import make_model, one_process_groups, packed_batch, tiny_config

_ATTENTION_NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def _hf_model(config: MLATransformerConfig) -> DeepseekV3ForCausalLM:
    hf_config = DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        moe_intermediate_size=config.moe_ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        n_shared_experts=1,
        n_routed_experts=config.num_moe_experts,
        routed_scaling_factor=config.moe_router_topk_scaling_factor,
        kv_lora_rank=config.kv_lora_rank,
        q_lora_rank=config.q_lora_rank,
        qk_rope_head_dim=config.qk_pos_emb_head_dim,
        v_head_dim=config.v_head_dim,
        qk_nope_head_dim=config.qk_head_dim,
        n_group=config.moe_router_num_groups,
        topk_group=config.moe_router_group_topk,
        num_experts_per_tok=config.moe_router_topk,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.layernorm_epsilon,
        rope_theta=config.rotary_base,
        rope_scaling={
            "type": "yarn",
            "rope_type": "yarn",
            "factor": config.rotary_scaling_factor,
            "mscale": config.mscale,
            "mscale_all_dim": config.mscale_all_dim,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return DeepseekV3ForCausalLM(hf_config).to(torch.float32).eval()


def _hf_weights(model: GPTModel) -> dict[str, torch.Tensor]:
    """Our weights under the names of a DeepSeek checkpoint."""
    named: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": model.embedding.word_embeddings.weight,
        "model.norm.weight": model.decoder.final_layernorm.weight,
        "lm_head.weight": model.output_layer.weight,
    }
    for index, layer in enumerate(model.decoder.layers):
        prefix = f"model.layers.{index}"
        named[f"{prefix}.input_layernorm.weight"] = layer.input_layernorm.weight
        named[f"{prefix}.post_attention_layernorm.weight"] = layer.pre_mlp_layernorm.weight
        for name, child in layer.self_attention.named_children():
            named[f"{prefix}.self_attn.{_ATTENTION_NAMES[name]}.weight"] = child.weight
        named |= _mlp_weights(layer.mlp, f"{prefix}.mlp")
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _mlp_weights(mlp: Any, prefix: str) -> dict[str, torch.Tensor]:
    if hasattr(mlp, "linear_fc1"):
        gate, up = mlp.linear_fc1.weight.chunk(2)
        return {
            f"{prefix}.gate_proj.weight": gate,
            f"{prefix}.up_proj.weight": up,
            f"{prefix}.down_proj.weight": mlp.linear_fc2.weight,
        }
    named = {
        f"{prefix}.gate.weight": mlp.router.weight,
        f"{prefix}.gate.e_score_correction_bias": mlp.router.expert_bias,
    }
    named |= _mlp_weights(mlp.shared_experts, f"{prefix}.shared_experts")
    for expert in range(mlp.experts.num_local_experts):
        gate, up = mlp.experts.weight1[expert].chunk(2, dim=1)
        named[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate.t()
        named[f"{prefix}.experts.{expert}.up_proj.weight"] = up.t()
        named[f"{prefix}.experts.{expert}.down_proj.weight"] = mlp.experts.weight2[expert].t()
    return named


@pytest.mark.parametrize("q_lora_rank", [32, None])
def test_logits_equal_transformers(q_lora_rank: int | None, tmp_path: Any) -> None:
    from safetensors.torch import save_file

    config = tiny_config(q_lora_rank=q_lora_rank)
    lengths = [70, 1, 33, 12]
    batch = packed_batch(lengths, config.vocab_size)
    with one_process_groups() as groups, torch.no_grad():
        model = make_model(config, groups).eval()
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        logits_TV = model(batch.ids_T, batch.positions_T, batch.params)
        weights = _hf_weights(model)
    hf = _hf_model(config)
    hf.config.save_pretrained(tmp_path)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    hf, report = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        expected = torch.cat([hf(ids.unsqueeze(0)).logits[0] for ids in batch.ids_T.split(lengths)])
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits_TV, expected, atol=2e-5, rtol=0)
