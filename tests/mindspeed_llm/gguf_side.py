"""GGUF files of random models, written by gguf's own writer, name map and quantiser, and what they then hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_formats.config import parse_hf_config
from tests.mindspeed_llm.tiny import tiny_weights

gguf = pytest.importorskip(
    "gguf", reason="gguf, which reads such files, is not installed: requirements/base.txt has it"
)
quants = pytest.importorskip("gguf.quants")

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "deepseek_v3": "deepseek2",
    "deepseek_v2": "deepseek2",
}
# Where a block of a K kind has its scales in fp16: gguf can read these kinds, not write them.
K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PRE = {"qwen": "qwen2", "llama3": "llama-bpe"}
PRE |= {"published deepseek_v3": "deepseek-v3", "published qwen3": "qwen2"}
PRE |= {"published llama3": "llama-bpe", "published llama3_1": "llama-bpe"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(
    file: Path,
    config: dict[str, Any],
    kind: str = "F32",
    *,
    tokenizer: tuple[str, Path] | None = None,
    is_divided: bool = False,
    **keys: Any,
) -> dict[str, Tensor]:
    """Write a random model whose matrices are of ``kind``; what it holds, in fp32 under Hugging Face names.

    tokenizer: a name of ``PRE`` (or "llama2") and its folder; without one the tokens are numbers. is_divided:
    ``kv_b_proj`` is two tensors, as newer files have it. keys: further keys of the architecture.
    """
    hf = parse_hf_config(config)
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, name)
    _add_keys(writer, config, is_divided)
    for key, value in keys.items():
        add = {int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}[type(value)]
        add(f"{name}.{key}", value)
    if tokenizer is None:
        add_tokens(writer, "gpt2", "gpt-2", [str(index) for index in range(config["vocab_size"])])
    else:
        add_tokenizer(writer, *tokenizer)
    table = gguf.get_tensor_name_map(
        next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name), hf.num_hidden_layers
    )
    held, stacks = {}, {}
    for hf_name, weight in tiny_weights(config).items():
        general = re.sub(r"\.\d+\.(?=(gate|up|down)_proj)", ".", hf_name).replace("correction_bias", "correction.bias")
        known = table.get_name(general, try_suffixes=(".weight", ".bias"))
        is_plain = weight.dim() == 1 or "mlp.gate." in hf_name
        stored, values = _stored(weight, "F32" if is_plain else kind)
        held[hf_name] = torch.from_numpy(values.copy()).view(weight.shape)
        if is_divided and "kv_b_proj" in hf_name:
            heads = held[hf_name].view(hf.num_attention_heads, -1, hf.kv_lora_rank)
            key_rows, value_rows = heads.split([hf.qk_nope_head_dim, hf.v_head_dim], dim=1)
            writer.add_tensor(known.replace("kv_b", "k_b"), key_rows.transpose(1, 2).contiguous().numpy())
            writer.add_tensor(known.replace("kv_b", "v_b"), value_rows.contiguous().numpy())
        elif ".experts." in hf_name:
            stacks.setdefault(known, []).append(stored)
        else:
            if name == "llama" and re.search(r"[qk]_proj", hf_name):
                stored = _neighbours(stored, hf.head_dim)
            _add(writer, known, stored, "F32" if is_plain else kind)
    for known, parts in stacks.items():
        _add(writer, known, np.stack(parts), kind)
    if hf.rope.rope_type == "llama3":
        plain = hf.rope.rope_theta ** (-torch.arange(0, hf.rope_dim, 2, dtype=torch.float64) / hf.rope_dim)
        divisors = plain / torch.tensor(hf.rope.inverse_frequencies(hf.rope_dim), dtype=torch.float64)
        writer.add_tensor("rope_freqs.weight", divisors.float().numpy())
    finish(writer)
    return held


def finish(writer: Any) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, name: str, folder: Path) -> None:
    """The tokens of ``tests/real_tokenizers.py``'s kind of that name, which is in ``folder``."""
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {one["id"]: one for one in whole["added_tokens"]}
    ids = {index: token for token, index in whole["model"]["vocab"].items()}
    ids |= {index: one["content"] for index, one in added.items()}
    tokens = [ids.get(index, f"[PAD{index}]") for index in range(max(ids) + 1)]
    types = [1 if index in ids else 5 for index in range(len(tokens))]
    for index, one in added.items():
        types[index] = 3 if one["special"] else 4
    merges = [one if isinstance(one, str) else " ".join(one) for one in whole["model"]["merges"]]
    if name == "llama2":
        types = [6 if re.fullmatch("<0x..>", token) else kind for token, kind in zip(tokens, types, strict=True)]
        rank = {merge.replace(" ", ""): index for index, merge in reversed(list(enumerate(merges)))}
        scores = [-float(rank.get(token, len(rank))) for token in tokens]
        add_tokens(writer, "llama", "default", tokens, types, scores=scores)
        writer.add_unk_token_id(tokens.index("<unk>"))
    else:
        add_tokens(writer, "gpt2", PRE[name], tokens, types, merges)
    for kind, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        token = config.get(f"{kind}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token:
            add(tokens.index(token))
    if "add_bos_token" in config:
        writer.add_add_bos_token(config["add_bos_token"])
    writer.add_chat_template(TEMPLATE)


def add_tokens(
    writer: Any,
    model: str,
    pre: str,
    tokens: list[str],
    types: list[int] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
) -> None:
    """Keys of a tokenizer."""
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [1] * len(tokens))
    if scores is not None:
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges(merges or ["1 0"])


def _add_keys(writer: Any, config: dict[str, Any], is_divided: bool) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    if "moe_intermediate_size" in config:
        writer.add_expert_count(config.get("n_routed_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "kv_lora_rank" not in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        if "head_dim" in config:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        return
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    length, value_length = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    if is_divided:
        writer.add_head_count_kv(1)
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(length)
        writer.add_value_length_mla(value_length)
    else:
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(length)
        writer.add_value_length(value_length)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    is_sigmoid = config["scoring_func"] == "sigmoid"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if is_sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    )
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _stored(weight: Tensor, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What the file holds of a matrix, and its values; of a K kind random blocks."""
    number = gguf.GGMLQuantizationType[kind]
    if kind == "I8":
        return weight.to(torch.int8).numpy(), weight.numpy()
    if kind in K_SCALES:
        size, num_bytes = gguf.GGML_QUANT_SIZES[number]
        blocks = np.random.default_rng(0).integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // size, num_bytes))
        blocks = blocks.astype(np.uint8)
        for place in K_SCALES[kind]:
            blocks[..., place : place + 2] = np.array([2e-4], dtype="<f2").view(np.uint8)
        stored = blocks.reshape(*weight.shape[:-1], -1)
    else:
        stored = quants.quantize(weight.numpy(), number)
    return stored, np.asarray(quants.dequantize(stored, number))


def _add(writer: Any, name: str, stored: np.ndarray, kind: str) -> None:
    if kind in ("F32", "F16", "I8"):  # the writer reads these from the array
        writer.add_tensor(name, stored)
    else:
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType[kind])


def _neighbours(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a head in the file's order: channel i beside channel i + head_dim / 2."""
    order = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return np.ascontiguousarray(heads[:, order].reshape(rows.shape))
