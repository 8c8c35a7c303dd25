"""Keys that repeat what the model's config.json says, as Megatron and MindSpeed need them: compared, never used.

Names: MindSpeed's ``rope_scaling_*``, Megatron's ``yarn_*`` and ``rotary_scaling_factor``, and the bare names of
Megatron's ``MLATransformerConfig``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_formats.config import parse_hf_config, read_config_dict
from hf_formats.families.family import common_keys
from verl.trainer.config.fixed_keys import WithoutEffect

_SECTION = re.compile(r"actor_rollout_ref\.(?:actor|ref)\.megatron\.override_transformer_config\.(\w+)")
_ROPE = re.compile(
    r"(?:rope_scaling_|rotary_scaling_|yarn_(?:rotary_)?(?:scaling_)?)"
    r"(factor|beta_fast|beta_slow|mscale|mscale_all_dim|original_max_position_embeddings|type)"
    r"|(beta_fast|beta_slow|mscale|mscale_all_dim|original_max_position_embeddings)"
)
_QK_NORM = "norms of queries and keys"
# Names of Megatron's TransformerConfig -> config.json's.
_FIELDS = {
    "multi_head_latent_attention": "latent attention",
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


@dataclass(frozen=True)
class ModelKey:
    """A key that was given and its field in config.json, as ``rope_scaling.factor``."""

    key: str
    value: Any
    field: str


def take_model_keys(tree: dict[str, Any], prefix: str = "") -> list[ModelKey]:
    """Remove and return the keys of ``override_transformer_config`` that repeat config.json."""
    taken = []
    for key, value in list(tree.items()):
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            taken += take_model_keys(value, f"{name}.")
        elif (found := _SECTION.fullmatch(name)) and (field := _field_of(found[1])):
            taken.append(ModelKey(name, value, field))
            del tree[key]
    return taken


def compare_model_keys(given: list[ModelKey], model_path: str) -> tuple[list[WithoutEffect], list[str]]:
    """The keys that agree with ``model_path``/config.json, and one sentence with both values for each that does not."""
    file = Path(model_path).expanduser() / "config.json"
    raw = config_json(model_path)
    if raw is None:
        return [WithoutEffect(item.key, item.value, _UNREAD) for item in given], []
    problems = list(_differences(given, raw, file))
    return [WithoutEffect(item.key, item.value, _REASON) for item in given], problems


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


def _differences(given: list[ModelKey], raw: Mapping[str, Any], file: Path) -> Iterator[str]:
    for item in given:
        theirs = _value(item.field, raw)
        if not _is_equal(item.value, theirs):
            yield (
                f"{item.key} is {item.value!r}, but {item.field} of {file} is {theirs!r}; the file decides: leave the "
                "key out or change the file"
            )


def _field_of(name: str) -> str | None:
    if found := _ROPE.fullmatch(name):
        return f"rope_scaling.{found[1] or found[2]}"
    return _FIELDS.get(name)


def _value(field: str, raw: Mapping[str, Any]) -> Any:
    """What config.json says in a field, as the value that its key would have."""
    scaling = raw.get("rope_scaling") or {}
    if field == "kind of positions":
        return "rope"
    if field == _QK_NORM:
        return raw.get(field, True)  # absent: of a model that preflight refuses
    if field == "latent attention":
        return bool(raw.get("kv_lora_rank"))
    if field == "rope_scaling":
        return bool(scaling)
    if field == "rope_theta":
        return raw.get("rope_theta", 10000.0)
    if not field.startswith("rope_scaling."):
        return raw.get(field)
    name = field.removeprefix("rope_scaling.")
    if name == "type":
        return scaling.get("rope_type") or scaling.get("type") or "rope"
    return scaling.get(name, _YARN_DEFAULTS.get(name) if scaling else None)


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, bool) or isinstance(theirs, bool) or isinstance(ours, str):
        return bool(ours == theirs)
    return isinstance(ours, int | float) and isinstance(theirs, int | float) and float(ours) == float(theirs)
