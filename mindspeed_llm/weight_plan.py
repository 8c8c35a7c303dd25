"""Which slices of which Hugging Face tensors make up each rank's local tensors: a pure function of config and layout.

Letters in comments: T/R = split over TP / replicated, H hidden, F expert ffn width, E_loc experts of one EP rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from megatron.core.parallel_layout import ParallelLayout, RankCoords
from mindspeed_llm.hf_config import HFModelConfig

Slice = tuple[tuple[int, int], ...]
TensorSpec = tuple[tuple[int, ...], str]  # shape, dtype name
Naming = Literal["core", "mindspeed_llm", "mindspeed_llm_ungrouped"]
NAMINGS: tuple[Naming, ...] = ("core", "mindspeed_llm", "mindspeed_llm_ungrouped")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Piece:
    """``local[local_slice] = hf[hf_slice]``, transposed first if ``transpose``; an expert's slice loses dim 0."""

    hf_name: str
    hf_slice: Slice
    local_slice: Slice
    transpose: bool = False


@dataclass(frozen=True)
class LocalTensor:
    """One parameter or buffer of one rank and the pieces that fill it completely.

    ``dtype`` is the dtype of the checkpoint (the router's correction bias is fp32 whatever the weights are).
    ``file_shape`` is the shape under which a sharded checkpoint file stores the same bytes, when it differs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    is_buffer: bool = False
    is_expert: bool = False
    file_shape: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the checkpoint's dtype."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Fragment:
    """A distinct slice of an HF tensor, the lowest global rank that holds it, and where that rank keeps it."""

    owner: int
    local_name: str
    piece: Piece


@lru_cache(maxsize=8)
def hf_tensors(hf: HFModelConfig) -> Mapping[str, TensorSpec]:
    """Name -> (shape, dtype) of every tensor of the plain checkpoint (no FP8 scales, no MTP layer), in file order."""
    hidden, dtype = hf.hidden_size, hf.torch_dtype
    tensors: dict[str, TensorSpec] = {"model.embed_tokens.weight": ((hf.vocab_size, hidden), dtype)}
    for layer in range(hf.num_hidden_layers):
        tensors.update(layer_tensors(hf, layer, hf.is_moe_layer(layer)))
    tensors["model.norm.weight"] = ((hidden,), dtype)
    tensors["lm_head.weight"] = ((hf.vocab_size, hidden), dtype)
    return MappingProxyType(tensors)


def layer_tensors(hf: HFModelConfig, layer: int, is_moe: bool) -> dict[str, TensorSpec]:
    """Name -> (shape, dtype) of decoder layer ``layer`` (also the MTP layer's transformer part)."""
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if hf.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (heads * hf.qk_head_dim, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (hf.q_lora_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (hf.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (heads * hf.qk_head_dim, hf.q_lora_rank)
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = (hf.kv_lora_rank + hf.qk_rope_head_dim, hidden)
    shapes["self_attn.kv_a_layernorm.weight"] = (hf.kv_lora_rank,)
    shapes["self_attn.kv_b_proj.weight"] = (heads * (hf.qk_nope_head_dim + hf.v_head_dim), hf.kv_lora_rank)
    shapes["self_attn.o_proj.weight"] = (hidden, heads * hf.v_head_dim)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if is_moe:
        shapes["mlp.gate.weight"] = (hf.n_routed_experts, hidden)
        if hf.has_expert_bias:
            shapes["mlp.gate.e_score_correction_bias"] = (hf.n_routed_experts,)
        for expert in range(hf.n_routed_experts):
            shapes.update(_mlp_shapes(f"mlp.experts.{expert}", hidden, hf.moe_intermediate_size))
        if hf.n_shared_experts:
            shapes.update(_mlp_shapes("mlp.shared_experts", hidden, hf.shared_expert_intermediate_size))
    else:
        shapes.update(_mlp_shapes("mlp", hidden, hf.intermediate_size))
    prefix = f"model.layers.{layer}."
    return {
        prefix + name: (shape, "float32" if always_fp32(name) else hf.torch_dtype) for name, shape in shapes.items()
    }


def mtp_tensors(hf: HFModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Name -> (shape, dtype) of the multi-token-prediction module that DeepSeek publishes as layer ``layer``."""
    hidden, vocab, prefix = hf.hidden_size, hf.vocab_size, f"model.layers.{layer}."
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    own: dict[str, TensorSpec] = {prefix + name: (shape, hf.torch_dtype) for name, shape in shapes.items()}
    return own | layer_tensors(hf, layer, is_moe=True)


def always_fp32(hf_name: str) -> bool:
    """Whether DeepSeek keeps this tensor in fp32 whatever the weights' dtype: the router's correction bias."""
    return hf_name.endswith("e_score_correction_bias")


def plan_problems(hf: HFModelConfig, layout: ParallelLayout) -> list[str]:
    """Everything that keeps ``layout`` from dividing this model; experts may also be split (expert TP > 1)."""
    etp = layout.expert_tensor_parallel_size
    found = layout.problems(hf.num_hidden_layers, hf.n_routed_experts, hf.num_attention_heads, hf.vocab_size)
    tp = layout.tensor_model_parallel_size
    widths = [("intermediate_size", hf.intermediate_size, tp)]
    if hf.n_shared_experts:
        widths.append(("shared expert width", hf.shared_expert_intermediate_size, tp))
    widths.append(("moe_intermediate_size", hf.moe_intermediate_size, etp))
    found.extend(f"{what} {size} does not divide by {ways}" for what, size, ways in widths if ways > 1 and size % ways)
    if etp not in (1, tp):
        found.append(f"expert_tensor_parallel_size {etp} is neither 1 nor tensor_model_parallel_size {tp}")
    return found


def local_plan(
    hf: HFModelConfig, layout: ParallelLayout, coords: RankCoords, naming: Naming = "core"
) -> tuple[LocalTensor, ...]:
    """Every tensor of the rank at ``coords``, in model order; layer numbers count from the start of its PP stage.

    ``core`` are the training engine's names; ``mindspeed_llm`` the checkpoint names of MindSpeed-LLM v2.0.0 with
    grouped experts, ``mindspeed_llm_ungrouped`` the same with one tensor per expert.
    """
    if naming not in NAMINGS:
        raise ValueError(f"naming is {naming!r}; one of {', '.join(NAMINGS)} is needed")
    problems = plan_problems(hf, layout)
    if problems:
        raise ValueError("the layout does not fit the model:\n" + "\n".join(f"  - {line}" for line in problems))
    return tuple(_RankPlanner(hf, layout, coords, naming).tensors())


@lru_cache(maxsize=4)
def fragments(hf: HFModelConfig, layout: ParallelLayout, naming: Naming = "core") -> Mapping[str, tuple[Fragment, ...]]:
    """HF name -> its distinct fragments, each with its owner; names in the order of ``hf_tensors``."""
    found: dict[tuple[str, Slice], Fragment] = {}
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        if coords.dp > 0 and coords.edp > 0:
            continue  # a lower rank holds the same dense tensors and another the same experts
        for tensor in local_plan(hf, layout, coords, naming):
            for piece in tensor.pieces:
                key = (piece.hf_name, piece.hf_slice)
                if key not in found:
                    found[key] = Fragment(rank, tensor.name, piece)
    by_name: dict[str, list[Fragment]] = {name: [] for name in hf_tensors(hf)}
    for (name, _), fragment in found.items():
        by_name[name].append(fragment)
    return MappingProxyType({name: tuple(parts) for name, parts in by_name.items()})


def owners(hf: HFModelConfig, layout: ParallelLayout, naming: Naming = "core") -> dict[tuple[str, Slice], int]:
    """(hf_name, hf_slice) -> lowest global rank that holds it, for every distinct fragment of the model."""
    return {
        (name, fragment.piece.hf_slice): fragment.owner
        for name, parts in fragments(hf, layout, naming).items()
        for fragment in parts
    }


def plan_bytes(plan: Iterable[LocalTensor]) -> int:
    """Bytes of all tensors of one rank in the checkpoint's dtypes."""
    return sum(tensor.num_bytes for tensor in plan)


def plan_elements(plan: Iterable[LocalTensor]) -> int:
    """Elements of all tensors of one rank."""
    return sum(tensor.num_elements for tensor in plan)


def hf_bytes(hf: HFModelConfig) -> int:
    """Bytes of the plain checkpoint."""
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in hf_tensors(hf).values())


def slice_shape(extent: Slice) -> tuple[int, ...]:
    """Shape of a slice."""
    return tuple(stop - start for start, stop in extent)


@dataclass(frozen=True)
class _RankPlanner:
    """Walks the model of one rank; the two naming families differ only in the two attention and expert methods."""

    hf: HFModelConfig
    layout: ParallelLayout
    coords: RankCoords
    naming: Naming

    def tensors(self) -> Iterator[LocalTensor]:
        hf, coords = self.hf, self.coords
        if coords.pp == 0:
            yield self._split("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], 0)
        for local, layer in enumerate(self.layout.stage_layers(coords.pp, hf.num_hidden_layers)):
            yield from self._layer(f"decoder.layers.{local}.", f"model.layers.{layer}.", hf.is_moe_layer(layer))
        if coords.pp == self.layout.pipeline_model_parallel_size - 1:
            yield self._split("decoder.final_layernorm.weight", ["model.norm.weight"], None)
            yield self._split("output_layer.weight", ["lm_head.weight"], 0)

    def _layer(self, local: str, source: str, is_moe: bool) -> Iterator[LocalTensor]:
        yield self._split(local + "input_layernorm.weight", [source + "input_layernorm.weight"], None)
        attention = self._core_attention if self.naming == "core" else self._mindspeed_attention
        yield from attention(local + "self_attention.", source + "self_attn.")
        yield self._split(local + "pre_mlp_layernorm.weight", [source + "post_attention_layernorm.weight"], None)
        if not is_moe:
            yield from self._mlp(local + "mlp.", source + "mlp.")
            return
        yield self._split(local + "mlp.router.weight", [source + "mlp.gate.weight"], None)
        if self.hf.has_expert_bias:
            bias = self._split(local + "mlp.router.expert_bias", [source + "mlp.gate.e_score_correction_bias"], None)
            yield replace(bias, is_buffer=True)
        experts = self._ungrouped_experts if self.naming == "mindspeed_llm_ungrouped" else self._grouped_experts
        yield from experts(local + "mlp.experts.", source + "mlp.experts.")
        if self.hf.n_shared_experts:
            yield from self._mlp(local + "mlp.shared_experts.", source + "mlp.shared_experts.")

    def _core_attention(self, local: str, source: str) -> Iterator[LocalTensor]:
        if self.hf.q_lora_rank is None:
            yield self._split(local + "linear_q_proj.weight", [source + "q_proj.weight"], 0)
        else:
            yield self._split(local + "linear_q_down_proj.weight", [source + "q_a_proj.weight"], None)
            yield self._split(local + "q_layernorm.weight", [source + "q_a_layernorm.weight"], None)
            yield self._split(local + "linear_q_up_proj.weight", [source + "q_b_proj.weight"], 0)
        yield self._split(local + "linear_kv_down_proj.weight", [source + "kv_a_proj_with_mqa.weight"], None)
        yield self._split(local + "kv_layernorm.weight", [source + "kv_a_layernorm.weight"], None)
        yield self._split(local + "linear_kv_up_proj.weight", [source + "kv_b_proj.weight"], 0)
        yield self._split(local + "linear_proj.weight", [source + "o_proj.weight"], 1)

    def _mindspeed_attention(self, local: str, source: str) -> Iterator[LocalTensor]:
        # Upstream's converter knows q-LoRA only; without it the full q_proj takes q_a_proj's place in linear_qkv.
        has_q_lora = self.hf.q_lora_rank is not None
        query = "q_a_proj.weight" if has_q_lora else "q_proj.weight"
        parts = [source + query, source + "kv_a_proj_with_mqa.weight"]
        yield self._split(local + "linear_qkv.weight", parts, None)
        if has_q_lora:
            yield self._split(local + "q_layernorm.weight", [source + "q_a_layernorm.weight"], None)
            yield self._split(local + "linear_qb.weight", [source + "q_b_proj.weight"], 0)
        yield self._split(local + "k_layernorm.weight", [source + "kv_a_layernorm.weight"], None)
        yield self._split(local + "linear_kvb.weight", [source + "kv_b_proj.weight"], 0)
        yield self._split(local + "linear_proj.weight", [source + "o_proj.weight"], 1)

    def _mlp(self, local: str, source: str) -> Iterator[LocalTensor]:
        yield self._split(local + "linear_fc1.weight", [source + "gate_proj.weight", source + "up_proj.weight"], 0)
        yield self._split(local + "linear_fc2.weight", [source + "down_proj.weight"], 1)

    def _grouped_experts(self, local: str, source: str) -> Iterator[LocalTensor]:
        # weight1 [E_loc, H, 2F/ETP] (gate then up), weight2 [E_loc, F/ETP, H]: transposed HF weights. MindSpeed-LLM
        # stores the same bytes as (H, -1) and (-1, H): a view, so columns of the file's weight1 are not experts.
        hidden, dtype = self.hf.hidden_size, self.hf.torch_dtype
        start, stop = _chunk(self.hf.moe_intermediate_size, self.coords.etp, self.layout.expert_tensor_parallel_size)
        width, full = stop - start, (0, hidden)
        first: list[Piece] = []
        second: list[Piece] = []
        experts = self._local_experts()
        for slot, expert in enumerate(experts):
            here = (slot, slot + 1)
            for name, columns in (("gate_proj", (0, width)), ("up_proj", (width, 2 * width))):
                hf_name = f"{source}{expert}.{name}.weight"
                first.append(Piece(hf_name, ((start, stop), full), (here, full, columns), transpose=True))
            hf_name = f"{source}{expert}.down_proj.weight"
            second.append(Piece(hf_name, (full, (start, stop)), (here, (0, width), full), transpose=True))
        count = len(experts)
        in_file = self.naming != "core"
        yield LocalTensor(
            name=local + "weight1",
            shape=(count, hidden, 2 * width),
            dtype=dtype,
            pieces=tuple(first),
            is_expert=True,
            file_shape=(hidden, count * 2 * width) if in_file else None,
        )
        yield LocalTensor(
            name=local + "weight2",
            shape=(count, width, hidden),
            dtype=dtype,
            pieces=tuple(second),
            is_expert=True,
            file_shape=(count * width, hidden) if in_file else None,
        )

    def _ungrouped_experts(self, local: str, source: str) -> Iterator[LocalTensor]:
        for slot, expert in enumerate(self._local_experts()):
            here, there = f"{local}local_experts.{slot}.", f"{source}{expert}."
            gate_up = [there + "gate_proj.weight", there + "up_proj.weight"]
            yield self._split(here + "linear_fc1.weight", gate_up, 0, is_expert=True)
            yield self._split(here + "linear_fc2.weight", [there + "down_proj.weight"], 1, is_expert=True)

    def _local_experts(self) -> range:
        start, stop = _chunk(self.hf.n_routed_experts, self.coords.ep, self.layout.expert_model_parallel_size)
        return range(start, stop)

    def _split(self, name: str, sources: list[str], dim: int | None, is_expert: bool = False) -> LocalTensor:
        """``sources`` stacked on dim 0, each cut along ``dim`` over (expert) TP first; ``dim`` None replicates."""
        if is_expert:
            index, ways = self.coords.etp, self.layout.expert_tensor_parallel_size
        else:
            index, ways = self.coords.tp, self.layout.tensor_model_parallel_size
        pieces, rows, dtype = [], 0, ""
        for source in sources:
            shape, dtype = hf_tensors(self.hf)[source]
            extent = tuple(_chunk(size, index, ways) if axis == dim else (0, size) for axis, size in enumerate(shape))
            cut = slice_shape(extent)
            pieces.append(Piece(source, extent, ((rows, rows + cut[0]), *((0, size) for size in cut[1:]))))
            rows += cut[0]
        return LocalTensor(name, (rows, *cut[1:]), dtype, tuple(pieces), is_expert=is_expert)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _chunk(size: int, index: int, ways: int) -> tuple[int, int]:
    return size * index // ways, size * (index + 1) // ways
