"""Names and shapes of a decoder layer's tensors in a Hugging Face checkpoint, and how tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from hf_formats.config import HFModelConfig

Split: TypeAlias = Literal[0, 1, "kv_heads"] | None
"""The dimension that is cut; "kv_heads": dimension 0, by heads of keys and values; None: the tensor is whole."""


class LayerTensor(NamedTuple):
    """One tensor; ``name`` comes after ``model.layers.{number}.``."""

    name: str
    shape: tuple[int, ...]
    split: Split = None


def layer_tensors(hf: HFModelConfig, is_moe: bool, experts: Iterable[int] = ()) -> Iterator[LayerTensor]:
    """The tensors of a layer in the order of a checkpoint, of its routed experts those numbered ``experts``."""
    hidden = hf.hidden_size
    yield LayerTensor("input_layernorm.weight", (hidden,))
    yield from _latent_attention(hf) if hf.is_mla else _grouped_query_attention(hf)
    yield LayerTensor("post_attention_layernorm.weight", (hidden,))
    if not is_moe:
        yield from mlp_tensors("mlp", hidden, hf.intermediate_size)
        return
    yield LayerTensor("mlp.gate.weight", (hf.n_routed_experts, hidden))
    if hf.has_expert_bias:
        yield LayerTensor("mlp.gate.e_score_correction_bias", (hf.n_routed_experts,))
    for expert in experts:
        yield from mlp_tensors(f"mlp.experts.{expert}", hidden, hf.moe_intermediate_size)
    if hf.n_shared_experts:
        yield from mlp_tensors("mlp.shared_experts", hidden, hf.shared_expert_intermediate_size)


def mtp_own_tensors(hf: HFModelConfig) -> Iterator[LayerTensor]:
    """The tensors of a multi-token-prediction module beside those of its layer, without its copies of the model's."""
    hidden = hf.hidden_size
    yield LayerTensor("enorm.weight", (hidden,))
    yield LayerTensor("hnorm.weight", (hidden,))
    yield LayerTensor("eh_proj.weight", (hidden, 2 * hidden))
    yield LayerTensor("shared_head.norm.weight", (hidden,))


def mlp_tensors(prefix: str, hidden: int, width: int) -> Iterator[LayerTensor]:
    """The three matrices of a SwiGLU block."""
    yield LayerTensor(f"{prefix}.gate_proj.weight", (width, hidden), 0)
    yield LayerTensor(f"{prefix}.up_proj.weight", (width, hidden), 0)
    yield LayerTensor(f"{prefix}.down_proj.weight", (hidden, width), 1)


def _latent_attention(hf: HFModelConfig) -> Iterator[LayerTensor]:
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    query_rows = heads * hf.qk_head_dim
    if hf.q_lora_rank is None:
        yield LayerTensor("self_attn.q_proj.weight", (query_rows, hidden), 0)
    else:
        yield LayerTensor("self_attn.q_a_proj.weight", (hf.q_lora_rank, hidden))
        yield LayerTensor("self_attn.q_a_layernorm.weight", (hf.q_lora_rank,))
        yield LayerTensor("self_attn.q_b_proj.weight", (query_rows, hf.q_lora_rank), 0)
    yield LayerTensor("self_attn.kv_a_proj_with_mqa.weight", (hf.kv_lora_rank + hf.qk_rope_head_dim, hidden))
    yield LayerTensor("self_attn.kv_a_layernorm.weight", (hf.kv_lora_rank,))
    kv_b_rows = heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    yield LayerTensor("self_attn.kv_b_proj.weight", (kv_b_rows, hf.kv_lora_rank), 0)
    yield LayerTensor("self_attn.o_proj.weight", (hidden, heads * hf.v_head_dim), 1)


def _grouped_query_attention(hf: HFModelConfig) -> Iterator[LayerTensor]:
    query_rows, kv_rows = hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    projections: tuple[tuple[str, int, Split], ...] = (
        ("q", query_rows, 0),
        ("k", kv_rows, "kv_heads"),
        ("v", kv_rows, "kv_heads"),
    )
    for kind, rows, split in projections:
        yield LayerTensor(f"self_attn.{kind}_proj.weight", (rows, hf.hidden_size), split)
    if hf.attention_bias:
        for kind, rows, split in projections:
            yield LayerTensor(f"self_attn.{kind}_proj.bias", (rows,), split)
    yield LayerTensor("self_attn.o_proj.weight", (hf.hidden_size, query_rows), 1)
    if hf.qk_norm:
        yield LayerTensor("self_attn.q_norm.weight", (hf.head_dim,))
        yield LayerTensor("self_attn.k_norm.weight", (hf.head_dim,))
