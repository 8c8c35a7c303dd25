"""The models and the work of the benchmarks, the same for every engine: config.json, checkpoints, batches, prompts."""

from __future__ import annotations

import json
import os
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_formats.config import HFModelConfig, parse_hf_config
from mindspeed_llm.hf_shapes import hf_tensors
from tools.plan.model_work import model_work, train_flops_per_token

ITEM_BYTES = {"bfloat16": 2, "float32": 4}  # by the dtype of a checkpoint
_MODELS = Path(__file__).parents[2] / "plan" / "models"
_WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank")


def model_config(model: str, divide: int = 1) -> dict[str, Any]:
    """The published config.json of a model that the planner knows, with every width divided."""
    config: dict[str, Any] = json.loads((_MODELS / model / "config.json").read_text(encoding="utf-8"))
    return config | {name: config[name] // divide for name in _WIDTHS if name in config}


def deepseek_v3_config(divide: int = 1, **overrides: Any) -> dict[str, Any]:
    """config.json with every width divided (and the number of heads), the rest as published, without rope scaling."""
    config = model_config("deepseek_v3", divide)
    del config["rope_scaling"], config["eos_token_id"]
    config |= {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
    heads = max(4, config["num_attention_heads"] // divide)
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "num_nextn_predict_layers": 1}
    return config | overrides


def small_config(hidden_size: int, num_layers: int, num_experts: int, vocab_size: int) -> dict[str, Any]:
    """A config.json with one dense layer, then MoE layers, of widths in about DeepSeek-V3's proportions."""
    heads = {"num_attention_heads": hidden_size // 64, "num_key_value_heads": hidden_size // 64}
    heads |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    widths = {"intermediate_size": hidden_size * 11 // 4, "moe_intermediate_size": hidden_size // 2}
    widths |= {"q_lora_rank": hidden_size * 3 // 8, "kv_lora_rank": hidden_size // 4, "vocab_size": vocab_size}
    experts = {"n_routed_experts": num_experts, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    layers = {"num_hidden_layers": num_layers, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    sizes = {"hidden_size": hidden_size, "max_position_embeddings": 4096}
    return deepseek_v3_config(**heads, **widths, **experts, **layers, **sizes, initializer_range=0.02)


_ENDS = {"bos_token_id": 0, "eos_token_id": 1}
_COMMON = {"max_position_embeddings": 40960, **_ENDS, "rope_interleave": True, "use_cache": True}
_SMALL = small_config(256, 4, 16, 2048) | {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 64}
_ATTENTION = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
# A: small, with DeepSeek-V3's own widths of latent attention; B: what fills this kind of machine; C: small throughout;
# tiny: the least model that runs, where a step is the host's; qwen3, qwen3_moe: attention of groups; smollm2-135m: what
# a laptop trains.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "A": _SMALL | dict(zip(_ATTENTION, (512, 64, 128, 128), strict=True)) | _COMMON,
    "B": small_config(1024, 8, 32, 2048) | _COMMON,
    "C": _SMALL | dict(zip(_ATTENTION, (64, 16, 32, 32), strict=True)) | _COMMON,
    "tiny": small_config(64, 2, 8, 256)
    | {"num_attention_heads": 2, "num_key_value_heads": 2}
    | dict(zip(_ATTENTION, (32, 16, 16, 16), strict=True))
    | _COMMON,
    "qwen3": model_config("qwen3_0.6b") | _ENDS,
    "qwen3_moe": model_config("qwen3_30b_a3b", divide=8) | {"num_attention_heads": 4, "num_key_value_heads": 1} | _ENDS,
}
_SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
CHECKPOINTS["smollm2-135m"] = _SMOLLM2 | _ENDS


def parsed(raw: dict[str, Any]) -> HFModelConfig:
    return parse_hf_config(raw, source="benchmark model")


def write_checkpoint(raw: dict[str, Any], dtype: str, path: Path) -> None:
    """A Hugging Face directory with random weights and a tokenizer of the words t0, t1, ...; kept if it is there.

    FileExistsError when ``path`` holds another model.
    """
    import torch
    from safetensors.torch import save_file

    config = json.dumps(raw | {"torch_dtype": dtype, "dtype": dtype}, indent=1)
    if (path / "config.json").is_file() and (path / "config.json").read_text() == config:
        return
    if path.exists():
        raise FileExistsError(f"{path} holds another model: remove it, or name another directory for --models")
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, (shape, _) in hf_tensors(parsed(raw)).items():
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


def _write_tokenizer(vocab_size: int, path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "t0", "eos_token": "t1", "pad_token": "t0", "unk_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(str(path))


@dataclass(frozen=True)
class Batch:
    """Token ids of the sequences of one step; each sequence predicts its own tokens from the second on."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.sequences))


def random_batch(lengths: list[int], vocab_size: int, seed: int) -> Batch:
    """Sequences of these lengths."""
    rng = random.Random(seed)
    return Batch(tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths))


def matmul_flops(hf: HFModelConfig, lengths: list[int]) -> float:
    """Floating-point operations of the matmuls of one forward and backward pass over sequences of these lengths.

    Attention counts its causal half; norms, activations and the optimizer are not counted (the convention of "MFU",
    PaLM, arXiv 2204.02311, appendix B).
    """
    work = model_work(hf)
    return 3.0 * sum(length * train_flops_per_token(work, (length + 1) / 2) for length in lengths)


def update_flops(hf: HFModelConfig, prompt_lengths: list[int], samples: int, new_tokens: int) -> float:
    """The same of an update that computes a prompt once for its samples, and logits of the new tokens alone."""
    work, flops = model_work(hf), 0.0
    for length in prompt_lengths:
        flops += length * (train_flops_per_token(work, (length + 1) / 2) - 2 * work.embedding)
        flops += samples * new_tokens * train_flops_per_token(work, length + (new_tokens + 1) / 2)
    return 3.0 * flops


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


@dataclass(frozen=True)
class LeastWork:
    """Bytes read once and floating-point operations of an engine that holds its weights in the given dtype."""

    num_bytes: float
    flops: float

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The time of a machine that reads and computes at the same time."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def decode_work(
    hf: HFModelConfig, item_bytes: int, num_sequences: int, mean_context: float, common: float = 0.0
) -> LeastWork:
    """One token for each sequence: all weights that take part, and each sequence's cache (of latents, if it has them).

    ``common`` is how many tokens of all contexts together another sequence has read too: a prompt is read once for all
    its samples.
    """
    work = model_work(hf)
    context = num_sequences * mean_context * work.num_layers
    cached = (context - common * work.num_layers) * work.layer.cache
    flops = num_sequences * train_flops_per_token(work, 0) + context * work.layer.absorbed_score
    return LeastWork(item_bytes * (read_weights(hf, num_sequences) + cached), flops)


def prefill_work(hf: HFModelConfig, item_bytes: int, lengths: list[int]) -> LeastWork:
    """Whole prompts, each with one token drawn at its end; keys and values expanded from the latents."""
    work = model_work(hf)
    flops = sum(length * train_flops_per_token(work, (length + 1) / 2) for length in lengths)
    flops -= 2 * work.embedding * (sum(lengths) - len(lengths))  # the head is as large, if not the same
    return LeastWork(item_bytes * read_weights(hf, sum(lengths)), flops)


def read_weights(hf: HFModelConfig, num_tokens: int) -> float:
    """Weights that a step over these tokens reads, with as many routed experts as are expected to be chosen."""
    work = model_work(hf)
    share = 1 - (1 - work.topk / max(work.num_experts, 1)) ** num_tokens
    return work.dense_parameters - work.head + share * work.expert_parameters  # one of the ends, which are as large


def cache_bytes_per_token(hf: HFModelConfig, item_bytes: int, is_latent: bool) -> int:
    """Bytes of a token in all layers' caches; where latents are expanded a head's value is as wide as its key."""
    is_expanded = hf.is_mla and not is_latent
    values = 2 * hf.num_attention_heads * hf.qk_head_dim if is_expanded else round(model_work(hf).layer.cache)
    return item_bytes * hf.num_hidden_layers * values
