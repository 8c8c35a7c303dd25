"""A model's dimensions as its Hugging Face config.json gives them, typed and checked, without remote code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from hf_formats.config_checks import DECODER_SIZES, config_problems, dtype_name
from hf_formats.families import model_family
from hf_formats.families.family import is_int
from hf_formats.problems import raise_problems
from hf_formats.rope import RopeConfig, parse_rope

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class HFModelConfig:
    """A decoder: latent or grouped-query attention, and dense layers or mixtures of experts in any order.

    Field names are config.json's, under DeepSeek's names where families differ; ``hf_formats/families`` fills them in.
    ``attention_bias``: queries, keys and values have biases. ``qk_norm``: an RMS norm on each head of queries and keys.
    ``rope_dim``: leading channels of a head that rotary positions turn (of latent attention, all of the rotary part).
    ``q_lora_rank`` None means that queries have one full projection (``q_proj``). ``moe_layer_freq`` m makes layer i a
    MoE layer when i >= first_k_dense_replace and i % m == 0. Sizes that the model does not have are 0.
    ``mtp_num_layers`` is the caller's choice (``with_mtp``), not config.json's: the number of the checkpoint's
    ``num_nextn_predict_layers`` modules that are built, loaded, trained and exported.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_dim: int
    initializer_range: float
    torch_dtype: str
    quant_method: str | None
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False

    head_dim: int = 0  # of grouped-query attention
    attention_bias: bool = False
    qk_norm: bool = False

    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    moe_intermediate_size: int = 0
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    n_group: int = 1
    topk_group: int = 1
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    aux_loss_alpha: float = 0.0
    num_nextn_predict_layers: int = 0
    mtp_num_layers: int = 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is latent; grouped-query attention otherwise."""
        return self.kv_lora_rank > 0

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, with its rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_expert_intermediate_size(self) -> int:
        """Hidden width of the shared expert; 0 when there is none."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers carry ``e_score_correction_bias`` (DeepSeek-V3's aux-loss-free balancing)."""
        return self.topk_method == "noaux_tc"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` has experts."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def has_moe_mtp(self) -> bool:
        """Whether multi-token-prediction modules have experts: their layer is of the kind of the last one."""
        return self.is_moe_layer(self.num_hidden_layers - 1)

    @property
    def num_moe_layers(self) -> int:
        """Number of decoder layers that have experts."""
        return sum(map(self.is_moe_layer, range(self.num_hidden_layers)))

    def with_mtp(self, mtp_num_layers: int) -> Self:
        """This model with its first multi-token-prediction modules; ValueError when the checkpoint has fewer."""
        if not 0 <= mtp_num_layers <= self.num_nextn_predict_layers:
            raise ValueError(
                f"mtp_num_layers is {mtp_num_layers}; config.json says that the checkpoint has "
                f"num_nextn_predict_layers {self.num_nextn_predict_layers} of them"
            )
        return replace(self, mtp_num_layers=mtp_num_layers)


def load_hf_config(path: str | Path) -> HFModelConfig:
    """Read ``path``, a config.json or its directory; one ValueError lists every problem."""
    hf = parse_hf_config(read_config_dict(path), source=str(config_file(path)))
    return replace(hf, eos_token_ids=end_token_ids(path))


def end_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids of ``eos_token_id`` in the config.json at ``path`` and in the generation_config.json beside it.

    Chat models name the end of a turn in one of them, and the end of a text in the other.
    """
    file = config_file(path)
    beside, ids = file.with_name(GENERATION_CONFIG), _eos_token_ids(read_config_dict(file), str(file))
    if beside.is_file():
        ids += _eos_token_ids(read_config_dict(beside), str(beside))
    return tuple(dict.fromkeys(ids))


def config_file(path: str | Path) -> Path:
    """Return the config.json at ``path``, which is the file itself or its directory."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def read_config_dict(path: str | Path) -> dict[str, Any]:
    """Return the content of the config.json at ``path`` (file or directory)."""
    file = config_file(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a directory in Hugging Face form (config.json inside)") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}; expected an object of model dimensions")
    return raw


def parse_hf_config(raw: Mapping[str, Any], source: str = "config") -> HFModelConfig:
    """Return the typed config of a config.json's content; the error names ``source`` and lists every problem."""
    family = model_family(raw, source)
    raise_problems(source, config_problems(raw, family))
    raw = {key: value for key, value in raw.items() if value is not None}
    return HFModelConfig(
        model_type=family.model_type,
        architecture=family.architecture,
        **{key: raw[key] for key in DECODER_SIZES},
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(raw),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        torch_dtype=dtype_name(raw),
        quant_method=(raw.get("quantization_config") or {}).get("quant_method"),
        eos_token_ids=_eos_token_ids(raw, source),
        **family.fields(raw),
    )


def _eos_token_ids(raw: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """The ids of ``eos_token_id``, which is one, a list or missing."""
    given = raw.get("eos_token_id")
    ids = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(map(is_int, ids)):
        raise ValueError(f"{source}: eos_token_id is {given!r}; expected a token's id, or a list of them")
    return ids


def without_quantisation_and_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of plain weights without multi-token-prediction layers.

    ``quantization_config`` is dropped and ``num_nextn_predict_layers`` is 0; every other key stays as it was.
    """
    cleaned = {key: value for key, value in config.items() if key != "quantization_config"}
    cleaned["num_nextn_predict_layers"] = 0
    return cleaned
