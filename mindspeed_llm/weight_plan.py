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

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from mindspeed_llm.hf_shapes import DTYPE_BYTES, hf_tensors, shared_copies

Slice = tuple[tuple[int, int], ...]
Naming = Literal["core", "mindspeed_llm", "mindspeed_llm_ungrouped"]
Part = Literal["all", "dense", "experts"]
NAMINGS: tuple[Naming, ...] = ("core", "mindspeed_llm", "mindspeed_llm_ungrouped")


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
    """A distinct slice of an HF tensor, the lowest global rank that holds it, and where its holders keep it."""

    owner: int
    local_name: str
    piece: Piece
    is_expert: bool = False


def plan_problems(hf: HFModelConfig, layout: ParallelLayout) -> list[str]:
    """Everything that keeps ``layout`` from dividing this model; experts may also be split (expert TP > 1)."""
    found = layout.problems(hf.num_hidden_layers, hf.n_routed_experts or None, hf.num_attention_heads, hf.vocab_size)
    tp, etp = layout.tensor_model_parallel_size, layout.expert_tensor_parallel_size
    widths = [("intermediate_size", hf.intermediate_size, tp)]
    if not hf.is_mla:
        widths.append(("num_key_value_heads", hf.num_key_value_heads, tp))
    if hf.n_shared_experts:
        widths.append(("shared expert width", hf.shared_expert_intermediate_size, tp))
    if hf.n_routed_experts:
        widths.append(("moe_intermediate_size", hf.moe_intermediate_size, etp))
    if layout.mla_down_proj_column_parallel and hf.is_mla:
        widths.append(("kv_lora_rank + qk_rope_head_dim", hf.kv_lora_rank + hf.qk_rope_head_dim, tp))
        widths.append(("q_lora_rank", hf.q_lora_rank or 0, tp))
    found.extend(f"{what} {size} does not divide by {ways}" for what, size, ways in widths if ways > 1 and size % ways)
    return found


def raise_layout_problems(hf: HFModelConfig, layout: ParallelLayout) -> None:
    """ValueError with everything that keeps ``layout`` from dividing this model."""
    problems = plan_problems(hf, layout)
    if problems:
        raise ValueError("the layout does not fit the model:\n" + "\n".join(f"  - {line}" for line in problems))


def local_plan(
    hf: HFModelConfig, layout: ParallelLayout, coords: RankCoords, naming: Naming = "core"
) -> tuple[LocalTensor, ...]:
    """Every tensor of the rank at ``coords``, in model order; layer numbers count from the start of its PP stage.

    With virtual stages names begin with ``chunks.{v}.`` and layers count from the start of their chunk. ``core`` are
    the training engine's names; ``mindspeed_llm`` the checkpoint names of MindSpeed-LLM v2.0.0 with grouped experts,
    where no-op layers leave holes in the numbers, ``mindspeed_llm_ungrouped`` the same with one tensor per expert.
    """
    raise_layout_problems(hf, layout)
    return tuple(_RankPlanner(hf, layout, coords, naming).tensors())


@lru_cache(maxsize=4)
def fragments(hf: HFModelConfig, layout: ParallelLayout, naming: Naming = "core") -> Mapping[str, tuple[Fragment, ...]]:
    """HF name -> its distinct fragments, each with its owner; names in the order of ``hf_tensors``.

    Walks one replica of the dense tensors and one of the experts, whatever the number of ranks.
    """
    raise_layout_problems(hf, layout)
    walks: list[tuple[int, Part]] = [(rank, "dense") for rank in layout.members(0, ("tp", "pp"))]
    walks += [(rank, "experts") for rank in layout.members(0, ("tp", "ep", "pp"), is_expert=True)]
    found: dict[tuple[str, Slice], Fragment] = {}
    for rank, part in walks:
        for tensor in _RankPlanner(hf, layout, layout.coords(rank), naming, part).tensors():
            for piece in tensor.pieces:
                key = (piece.hf_name, piece.hf_slice)
                if key not in found:
                    found[key] = Fragment(rank, tensor.name, piece, tensor.is_expert)
    by_name: dict[str, list[Fragment]] = {name: [] for name in hf_tensors(hf)}
    for (name, _), fragment in found.items():
        by_name[name].append(fragment)
    for name, original in shared_copies(hf).items():
        by_name[name] = [replace(part, piece=replace(part.piece, hf_name=name)) for part in by_name[original]]
    return MappingProxyType({name: tuple(parts) for name, parts in by_name.items()})


def holders(hf: HFModelConfig, layout: ParallelLayout, fragment: Fragment) -> list[int]:
    """Global ranks that keep ``fragment`` where its owner does, ascending.

    A tensor that stages share (a tied head, the embedding of an MTP module) counts where its owner is.
    """
    if fragment.is_expert:
        return layout.members(fragment.owner, ("dp",), is_expert=True)
    is_whole = slice_shape(fragment.piece.hf_slice) == hf_tensors(hf)[fragment.piece.hf_name][0]
    return layout.members(fragment.owner, ("tp", "cp", "dp") if is_whole else ("cp", "dp"))


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


def slice_shape(extent: Slice) -> tuple[int, ...]:
    """Shape of a slice."""
    return tuple(stop - start for start, stop in extent)


def rows_of(tensor: LocalTensor, start: int, stop: int) -> LocalTensor:
    """Rows ``start`` to ``stop`` (dim 0) of ``tensor`` as a tensor of their own, with the parts of pieces in them."""
    pieces = []
    for piece in tensor.pieces:
        first, last = piece.local_slice[0]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        hf_slice = piece.hf_slice
        if len(piece.local_slice) == len(hf_slice):  # otherwise dim 0 counts experts, which HF has as tensors
            top = hf_slice[0][0] - first
            hf_slice = ((top + low, top + high), *hf_slice[1:])
        pieces.append(
            replace(piece, hf_slice=hf_slice, local_slice=((low - start, high - start), *piece.local_slice[1:]))
        )
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), pieces=tuple(pieces), file_shape=None)


@dataclass(frozen=True)
class _RankPlanner:
    """Walks the model of one rank; the two naming families differ only in the two attention and expert methods."""

    hf: HFModelConfig
    layout: ParallelLayout
    coords: RankCoords
    naming: Naming
    part: Part = "all"

    def __post_init__(self) -> None:
        if self.naming not in NAMINGS:
            raise ValueError(f"naming is {self.naming!r}; one of {', '.join(NAMINGS)} is needed")

    def tensors(self) -> Iterator[LocalTensor]:
        num_chunks = self.layout.virtual_pipeline_model_parallel_size
        for chunk in range(num_chunks):
            prefix = f"chunks.{chunk}." if num_chunks > 1 else ""
            for tensor in self._chunk(chunk, chunk == num_chunks - 1):
                yield replace(tensor, name=prefix + tensor.name)

    def _chunk(self, chunk: int, is_last_chunk: bool) -> Iterator[LocalTensor]:
        hf, pp = self.hf, self.coords.pp
        is_first, is_last = pp == 0 and chunk == 0, is_last_chunk and self._is_last_stage
        has_dense = self.part != "experts"
        if is_first and has_dense:
            yield self._split("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], 0)
        slots = self.layout.chunk_slots(pp, chunk, hf.num_hidden_layers)
        if self.naming == "core":
            slots = tuple(layer for layer in slots if layer is not None)
        for local, layer in enumerate(slots):
            if layer is not None:
                yield from self._layer(f"decoder.layers.{local}.", layer)
        if not is_last:
            return
        if has_dense:
            yield from self._end(is_first)
        for depth in range(hf.mtp_num_layers):
            yield from self._mtp(depth)
        if has_dense:
            yield from self._head(is_first)

    def _end(self, is_first: bool) -> Iterator[LocalTensor]:
        """What comes before the MTP modules: the final norm, and the embedding that they share."""
        has_file_mtp = self.naming != "core" and self.hf.mtp_num_layers > 0
        final_norm = "final_layernorm.weight" if has_file_mtp else "decoder.final_layernorm.weight"
        yield self._split(final_norm, ["model.norm.weight"], None)
        if self.hf.mtp_num_layers and not is_first:
            yield self._split("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], 0)

    def _head(self, is_first: bool) -> Iterator[LocalTensor]:
        if not self.hf.tie_word_embeddings:
            yield self._split("output_layer.weight", ["lm_head.weight"], 0)
        elif not is_first and not self.hf.mtp_num_layers:  # MTP has a copy of the embedding there already
            yield self._split("output_layer.weight", ["model.embed_tokens.weight"], 0)

    @property
    def _is_last_stage(self) -> bool:
        return self.coords.pp == self.layout.pipeline_model_parallel_size - 1

    def _mtp(self, depth: int) -> Iterator[LocalTensor]:
        local = f"mtp.layers.{depth}." if self.naming == "core" else f"mtp_layers.{depth}."
        layer = self.hf.num_hidden_layers + depth
        source = f"model.layers.{layer}."
        if self.part != "experts":
            yield self._split(local + "enorm.weight", [source + "enorm.weight"], None)
            yield self._split(local + "hnorm.weight", [source + "hnorm.weight"], None)
            yield self._split(local + "eh_proj.weight", [source + "eh_proj.weight"], 0)
        yield from self._layer(local + "transformer_layer.", layer)
        if self.part != "experts":
            yield self._split(local + "final_layernorm.weight", [source + "shared_head.norm.weight"], None)

    def _layer(self, local: str, layer: int) -> Iterator[LocalTensor]:
        source = f"model.layers.{layer}."
        is_moe = self.hf.is_moe_layer(min(layer, self.hf.num_hidden_layers - 1))  # MTP layers are as the last one
        if self.part != "experts":
            yield from self._dense_part(local, source, is_moe)
        if is_moe and self.part != "dense":
            experts = self._ungrouped_experts if self.naming == "mindspeed_llm_ungrouped" else self._grouped_experts
            yield from experts(local + "mlp.experts.", source + "mlp.experts.")
        if is_moe and self.hf.n_shared_experts and self.part != "experts":
            yield from self._mlp(local + "mlp.shared_experts.", source + "mlp.shared_experts.")

    def _dense_part(self, local: str, source: str, is_moe: bool) -> Iterator[LocalTensor]:
        """A layer up to its routed experts."""
        yield self._split(local + "input_layernorm.weight", [source + "input_layernorm.weight"], None)
        if not self.hf.is_mla:
            attention = self._grouped_query_attention
        else:
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

    def _core_attention(self, local: str, source: str) -> Iterator[LocalTensor]:
        down = 0 if self.layout.mla_down_proj_column_parallel else None
        if self.hf.q_lora_rank is None:
            yield self._split(local + "linear_q_proj.weight", [source + "q_proj.weight"], 0)
        else:
            yield self._split(local + "linear_q_down_proj.weight", [source + "q_a_proj.weight"], down)
            yield self._split(local + "q_layernorm.weight", [source + "q_a_layernorm.weight"], None)
            yield self._split(local + "linear_q_up_proj.weight", [source + "q_b_proj.weight"], 0)
        yield self._split(local + "linear_kv_down_proj.weight", [source + "kv_a_proj_with_mqa.weight"], down)
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

    def _grouped_query_attention(self, local: str, source: str) -> Iterator[LocalTensor]:
        """linear_qkv: for each head of keys and values its query heads, then the key, then the value; cut by them."""
        hf = self.hf
        size, per_group = hf.head_dim, hf.num_attention_heads // hf.num_key_value_heads
        start, stop = _part(hf.num_key_value_heads, self.coords.tp, self.layout.tensor_model_parallel_size)
        columns, pieces, rows = (0, hf.hidden_size), [], 0
        for group in range(start, stop):
            for name, heads in (("q_proj", per_group), ("k_proj", 1), ("v_proj", 1)):
                first, count = group * heads * size, heads * size
                there, here = ((first, first + count), columns), ((rows, rows + count), columns)
                pieces.append(Piece(f"{source}{name}.weight", there, here))
                rows += count
        yield LocalTensor(local + "linear_qkv.weight", (rows, hf.hidden_size), hf.torch_dtype, tuple(pieces))
        yield self._split(local + "q_layernorm.weight", [source + "q_norm.weight"], None)
        yield self._split(local + "k_layernorm.weight", [source + "k_norm.weight"], None)
        yield self._split(local + "linear_proj.weight", [source + "o_proj.weight"], 1)

    def _mlp(self, local: str, source: str) -> Iterator[LocalTensor]:
        yield self._split(local + "linear_fc1.weight", [source + "gate_proj.weight", source + "up_proj.weight"], 0)
        yield self._split(local + "linear_fc2.weight", [source + "down_proj.weight"], 1)

    def _grouped_experts(self, local: str, source: str) -> Iterator[LocalTensor]:
        # weight1 [E_loc, H, 2F/ETP] (gate then up), weight2 [E_loc, F/ETP, H]: transposed HF weights. MindSpeed-LLM
        # stores the same bytes as (H, -1) and (-1, H): a view, so columns of the file's weight1 are not experts.
        hidden, dtype = self.hf.hidden_size, self.hf.torch_dtype
        start, stop = _part(self.hf.moe_intermediate_size, self.coords.etp, self.layout.expert_tensor_parallel_size)
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
        start, stop = _part(self.hf.n_routed_experts, self.coords.ep, self.layout.expert_model_parallel_size)
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
            extent = tuple(_part(size, index, ways) if axis == dim else (0, size) for axis, size in enumerate(shape))
            cut = slice_shape(extent)
            pieces.append(Piece(source, extent, ((rows, rows + cut[0]), *((0, size) for size in cut[1:]))))
            rows += cut[0]
        return LocalTensor(name, (rows, *cut[1:]), dtype, tuple(pieces), is_expert=is_expert)


def _part(size: int, index: int, ways: int) -> tuple[int, int]:
    return size * index // ways, size * (index + 1) // ways
