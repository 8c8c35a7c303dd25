"""Checkpoints, prompts and the least work of a step of the rollout benchmark, the same for every engine."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.train_model import hf_config_dict

ITEM_BYTES = {"bfloat16": 2, "float32": 4}  # of the dtypes that checkpoints come in
_COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "max_position_embeddings": 40960,  # room for the answers over which the growth of a step is measured
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_cache": True,
}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64}
_SMALL = hf_config_dict(256, 4, 16, 2048) | _HEADS | _COMMON
# A: small, with DeepSeek-V3's own widths of latent attention; B: what fills this kind of machine; C: small throughout;
# tiny: the least model that runs, where a step is the host's.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "A": _SMALL | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "B": hf_config_dict(1024, 8, 32, 2048) | _COMMON,
    "C": _SMALL | {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32},
    "tiny": hf_config_dict(64, 2, 8, 256)
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 32}
    | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    | _COMMON,
}


@dataclass(frozen=True)
class Work:
    """What is generated at once: ``n`` samples of exactly ``new_tokens`` for prompts of some lengths."""

    name: str
    num_prompts: int
    shortest: int
    longest: int
    n: int = 1
    new_tokens: int = 128
    detokenize: bool = False
    has_model: bool = True  # False: everything but the model's forward, of our engine alone

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.n

    @property
    def max_tokens_per_sample(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return self.longest + self.new_tokens

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random ids, other ones for every seed: nothing of them is in a cache of earlier prompts."""
        rng = random.Random(f"{self.name} {seed}")
        lengths = [rng.randint(self.shortest, self.longest) for _ in range(self.num_prompts)]
        return [[rng.randrange(2, vocab_size) for _ in range(length)] for length in lengths]


def write_checkpoint(raw: dict[str, Any], dtype: str, path: Path) -> None:
    """A Hugging Face directory with random weights and a tokenizer of the words t0, t1, ...; kept if it is there."""
    import torch
    from safetensors.torch import save_file

    config = json.dumps(raw | {"torch_dtype": dtype, "dtype": dtype}, indent=1)
    if (path / "config.json").is_file() and (path / "config.json").read_text() == config:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in weight_shapes(raw):
        if "norm" in name:
            weights[name] = torch.ones(shape, dtype=getattr(torch, dtype))
        elif name.endswith("bias"):
            weights[name] = torch.zeros(shape, dtype=torch.float32)
        else:
            random_weight = torch.randn(shape, generator=generator) * raw["initializer_range"]
            weights[name] = random_weight.to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        building = Path(tmp) / "model"
        building.mkdir()
        save_file(weights, building / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(raw["vocab_size"], building)
        (building / "config.json").write_text(config)
        os.replace(building, path)


def weight_shapes(raw: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every weight of a DeepSeek-V3."""
    hidden, heads, latent = raw["hidden_size"], raw["num_attention_heads"], raw["kv_lora_rank"]
    rope, nope, value = raw["qk_rope_head_dim"], raw["qk_nope_head_dim"], raw["v_head_dim"]
    yield "model.embed_tokens.weight", (raw["vocab_size"], hidden)
    for layer in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_a_proj.weight", (raw["q_lora_rank"], hidden)
        yield f"{prefix}.self_attn.q_a_layernorm.weight", (raw["q_lora_rank"],)
        yield f"{prefix}.self_attn.q_b_proj.weight", (heads * (nope + rope), raw["q_lora_rank"])
        yield f"{prefix}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", (latent,)
        yield f"{prefix}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * value)
        if layer < raw["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", hidden, raw["intermediate_size"])
            continue
        width = raw["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", (raw["n_routed_experts"], hidden)
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (raw["n_routed_experts"],)
        for expert in range(raw["n_routed_experts"]):
            yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, width)
        yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, width * raw["n_shared_experts"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (raw["vocab_size"], hidden)


@dataclass(frozen=True)
class LeastWork:
    """Bytes read once and floating-point operations; overlapped they bound the time of an engine that holds its weights
    in the dtype asked for. One that holds them coded reads less.
    """

    num_bytes: float
    flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The time of a machine that reads and computes at the same time."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def decode_work(
    raw: dict[str, Any], item_bytes: int, num_sequences: int, mean_context: float, common: float = 0.0
) -> LeastWork:
    """One token for each sequence: all weights that take part, and each sequence's latent cache, absorbed.

    common: tokens of the contexts of all sequences together that others of them have read: of a prompt's samples, the
    prompt but once.
    """
    heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
    latent, cached = raw["kv_lora_rank"], raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    context = num_sequences * mean_context * layers
    num_bytes = item_bytes * (read_weights(raw, num_sequences) + (context - common * layers) * cached)
    return LeastWork(num_bytes, 2 * (num_sequences * active_weights(raw) + context * heads * (cached + latent)))


def prefill_work(raw: dict[str, Any], item_bytes: int, lengths: list[int]) -> LeastWork:
    """Whole prompts, each with one token drawn at its end; keys and values expanded from the latents."""
    num_tokens, head = sum(lengths), raw["vocab_size"] * raw["hidden_size"]
    pairs = sum(length * (length + 1) / 2 for length in lengths) * raw["num_hidden_layers"]
    per_pair = raw["num_attention_heads"] * (raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"] + raw["v_head_dim"])
    flops = 2 * ((active_weights(raw) - head) * num_tokens + head * len(lengths) + pairs * per_pair)
    return LeastWork(item_bytes * read_weights(raw, num_tokens), flops)


def read_weights(raw: dict[str, Any], num_tokens: int) -> float:
    """Weights that a step over these tokens reads: of routed experts, as many as are expected to be chosen by any."""
    num_experts = raw["n_routed_experts"]
    chosen = num_experts * (1 - (1 - raw["num_experts_per_tok"] / num_experts) ** num_tokens)
    return _weights(raw, chosen)


def active_weights(raw: dict[str, Any]) -> float:
    """Weights that one token meets; the embedding is a lookup."""
    return _weights(raw, raw["num_experts_per_tok"])


def cache_bytes_per_token(raw: dict[str, Any], item_bytes: int, is_latent: bool) -> int:
    """Bytes of a token in all layers' caches; without latent attention a head's value is as wide as its key."""
    head_dim = raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"]
    latent = raw["kv_lora_rank"] + raw["qk_rope_head_dim"]
    return item_bytes * raw["num_hidden_layers"] * (latent if is_latent else 2 * raw["num_attention_heads"] * head_dim)


def _weights(raw: dict[str, Any], experts_per_layer: float) -> float:
    """Elements of all matrices but the embedding, with that many routed experts of each layer."""
    routed = raw["num_hidden_layers"] - raw["first_k_dense_replace"]
    shapes = [(name, shape) for name, shape in weight_shapes(raw) if len(shape) == 2 and "embed" not in name]
    fixed = sum(rows * columns for name, (rows, columns) in shapes if ".experts." not in name)
    return fixed + routed * experts_per_layer * 3 * raw["hidden_size"] * raw["moe_intermediate_size"]


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def _write_tokenizer(vocab_size: int, path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t0", unk_token="t0"
    )
    tokenizer.save_pretrained(str(path))
