"""Keys that repeat what the model's config.json says, as Megatron and MindSpeed need them: compared, never used.

Names: MindSpeed's ``rope_scaling_*``, Megatron's ``yarn_*`` and ``rotary_scaling_factor``, and the bare names of
Megatron's ``MLATransformerConfig``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_formats.config import parse_hf_config, read_config_dict
from hf_formats.families.family import common_keys
from verl.trainer.config.fixed_keys import Given

_SECTION = re.compile(r"actor_rollout_ref\.(?:actor|ref)\.megatron\.override_transformer_config")
_ROPE = re.compile(
    r"(?:rope_scaling_|rotary_scaling_|yarn_(?:rotary_)?(?:scaling_)?)"
    r"(factor|beta_fast|beta_slow|mscale|mscale_all_dim|original_max_position_embeddings|type)"
    r"|(beta_fast|beta_slow|mscale|mscale_all_dim|original_max_position_embeddings)"
)
_QK_NORM = "norms of queries and keys"
# Names of Megatron's TransformerConfig -> config.json's.
_FIELDS = {
    "multi_head_latent_attention": "latent attention",
    "multi_latent_attention": "latent attention",
    "num_query_groups": "num_key_value_heads",
    "qk_layernorm": _QK_NORM,
    "position_embedding_type": "kind of positions",
    "use_rope_scaling": "rope_scaling",
    "rope_type": "rope_scaling.type",
    "rotary_base": "rope_theta",
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "num_moe_experts": "n_routed_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "moe_router_score_function": "scoring_func",
    "layernorm_epsilon": "rms_norm_eps",
}
_OF_EXPERTS = ("n_routed_experts", "scoring_func", "n_group", "topk_group", "routed_scaling_factor")
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
_REASON = "config.json of the model decides, and says the same"
_UNREAD = "config.json of the model decides, and will be compared where it can be read"


def take_model_keys(given: Given, model_path: str) -> None:
    """Take out the keys of ``override_transformer_config`` that repeat ``model_path``/config.json."""
    fields = {key: field for key in given.values if (field := _field_of(key))}
    raw = config_json(model_path) if fields else None
    theirs_by_field = _values(raw or {})
    for key, field in fields.items():
        value, theirs = given.values[key], theirs_by_field.get(field)
        if raw is not None and not _is_equal(value, theirs):
            given.problems.append(
                f"{key} is {value!r}, but {field} of {Path(model_path).expanduser()}/config.json is {theirs!r}; the "
                "file decides: leave the key out or change the file"
            )
        given.take(key, _UNREAD if raw is None else _REASON)


def config_json(model_path: str) -> dict[str, Any] | None:
    """The content of ``model_path``/config.json, with what families say under other names or not at all.

    None where there is none that can be read, which preflight reports.
    """
    try:
        raw = read_config_dict(Path(model_path).expanduser() / "config.json")
    except ValueError:
        return None
    found = common_keys(raw)
    with suppress(ValueError):  # preflight reports this too
        hf = parse_hf_config(raw)
        names = _OF_EXPERTS if hf.n_routed_experts else ()
        found = {name: getattr(hf, name) for name in names} | found | {_QK_NORM: hf.is_mla or hf.qk_norm}
    return found


def _field_of(key: str) -> str | None:
    """The field of config.json that a key repeats, as ``rope_scaling.factor``; None for other keys."""
    section, _, name = key.rpartition(".")
    if not _SECTION.fullmatch(section):
        return None
    if found := _ROPE.fullmatch(name):
        return f"rope_scaling.{found[1] or found[2]}"
    return _FIELDS.get(name)


def _values(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says by field, as the values that its keys would have; None is missing."""
    scaling = raw.get("rope_scaling") or {}
    rope = {**_YARN_DEFAULTS, **scaling} if scaling else {}
    rope["type"] = scaling.get("rope_type") or scaling.get("type") or "rope"
    return {
        **raw,
        **{f"rope_scaling.{name}": value for name, value in rope.items()},
        "rope_scaling": bool(scaling),
        "rope_theta": raw.get("rope_theta", 10000.0),
        "kind of positions": "rope",
        "latent attention": bool(raw.get("kv_lora_rank")),
        _QK_NORM: raw.get(_QK_NORM, True),  # absent: of a model that preflight refuses
    }


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool) or isinstance(ours, str):
        return bool(ours == theirs)
    return isinstance(ours, int | float) and isinstance(theirs, int | float) and float(ours) == float(theirs)
