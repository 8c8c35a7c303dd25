"""The config.json of a GGUF file's model.

keys.json has, for each architecture, the format's keys and what they are called in config.json; null where the code
below reads a key or the tensors' shapes say the same. All have llama's too. Of two keys of one name the last counts:
DeepSeek's newer files have a head's sizes under ``_mla``, and those of one latent head under the plain names.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from hf_formats.families import FAMILIES
from hf_formats.problems import raise_problems
from hf_formats.rope import RopeConfig
from mindspeed_llm.gguf_form.file import GGUFFile

logger = logging.getLogger(__name__)

_SIGMOID = 2  # expert_gating_func; 1 is softmax
# DeepSeek's files from before the group keys do not say how the experts of V3 (256) and V2 (160) are grouped.
_PUBLISHED_GROUPS = {256: (8, 4), 160: (8, 3)}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return config.json without ``torch_dtype``. ValueError: an architecture or a key of it that is not known."""
    known = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    name = str(file.keys.get("general.architecture"))
    if name not in known:
        raise ValueError(f"{file.path}: architecture {name!r} is not supported; supported: {', '.join(known)}")
    names = known["llama"] | known[name]
    given = {key.removeprefix(f"{name}."): value for key, value in file.keys.items() if key.startswith(f"{name}.")}
    unknown = [f"{name}.{key} (it is {given[key]!r}) is not known" for key in given if key not in names]
    raise_problems(str(file.path), unknown, "A model that is computed in another way cannot be converted.")
    config = {names[key]: given[key] for key in names if key in given and names[key]}
    config |= {"hidden_act": "silu", "model_type": name, "tie_word_embeddings": "output.weight" not in file.tensors}
    scaling = {key: config.pop(key) for key in list(config) if key.startswith("rope_scaling.")}
    if scaling.get("rope_scaling.type", "none") != "none":
        config["rope_scaling"] = {key.removeprefix("rope_scaling."): value for key, value in scaling.items()}
    config["vocab_size"] = len(file.keys.get("tokenizer.ggml.tokens", ()))
    if name == "qwen3moe":  # the weights of all published ones sum to 1; the format has no key for it
        config |= {"model_type": "qwen3_moe", "norm_topk_prob": True}
    config |= _latent(config, given) if name == "deepseek2" else _grouped_queries(file, given, config)
    return {"architectures": [FAMILIES[config["model_type"]].architecture], **config}


def _grouped_queries(file: GGUFFile, given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // (heads or 1)
    turned = given.get("rope.dimension_count", head_dim)
    if turned != head_dim:
        raise ValueError(f"{file.path}: positions turn {turned} of a head's {head_dim} channels; all are supported")
    found = {"head_dim": head_dim, "num_key_value_heads": config.get("num_key_value_heads", heads)}
    if "rope_freqs.weight" in file.tensors:
        found["rope_scaling"] = _llama3_scaling(file, config.get("rope_theta", 10000.0), head_dim)
    return found


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the scaling that the file has only as divisors of frequencies: Llama 3's with its low and high factor, and
    a power of two as the original context."""
    divisors = file.read("rope_freqs.weight", torch.float32).double()
    plain = torch.tensor(RopeConfig(rope_theta=theta).inverse_frequencies(head_dim), dtype=torch.float64)
    factors = {"factor": round(float(divisors.max()), 4), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (1 << bits for bits in range(13, 3, -1)):
        scaling: dict[str, Any] = {"rope_type": "llama3", "original_max_position_embeddings": original, **factors}
        found = torch.tensor(RopeConfig(rope_theta=theta, **scaling).inverse_frequencies(head_dim))
        if found.shape == divisors.shape and torch.allclose(found.double() * divisors, plain, rtol=1e-5, atol=0):
            return scaling
    raise ValueError(f"{file.path}: rope_freqs.weight is no scaling of Llama 3's form, the only one that is supported")


def _latent(config: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3 where experts are chosen by sigmoid scores, else V2."""
    is_v3 = given.get("expert_gating_func") == _SIGMOID
    found = {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "qk_nope_head_dim": config.pop("qk_head_dim", 0) - config.get("qk_rope_head_dim", 0),
        "num_key_value_heads": config.get("num_attention_heads"),  # newer files describe one latent head
        "norm_topk_prob": bool(config.get("norm_topk_prob")),
        "scoring_func": "sigmoid" if is_v3 else "softmax",
    }
    if "n_group" not in config and config.get("n_routed_experts") in _PUBLISHED_GROUPS:
        found["n_group"], found["topk_group"] = groups = _PUBLISHED_GROUPS[config["n_routed_experts"]]
        logger.warning("the file does not say how experts are grouped; taken as published: %d groups, best %d", *groups)
    has_groups = (config | found).get("n_group", 1) > 1
    found["topk_method"] = "noaux_tc" if is_v3 else "group_limited_greedy" if has_groups else "greedy"
    scaling = config.get("rope_scaling", {})
    if "mscale" in scaling:  # a tenth of mscale_all_dim, which in published models is mscale too
        scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * scaling["mscale"], 6)
    return found
