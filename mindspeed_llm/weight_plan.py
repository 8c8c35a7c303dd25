"""The weight plan: which parts of which Hugging Face tensors make up each rank's tensors, from config and layout.

Letters in comments: T/R = split over TP / replicated, H hidden, F expert ffn width, E_loc experts of one EP rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal

from hf_formats.config import HFModelConfig
from hf_formats.ranges import Ranges, shape_of
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from mindspeed_llm.hf_shapes import DTYPE_BYTES, hf_tensors, shared_copies

Naming = Literal["core", "mindspeed_llm", "mindspeed_llm_ungrouped"]
Part = Literal["all", "dense", "experts"]
NAMINGS: tuple[Naming, ...] = ("core", "mindspeed_llm", "mindspeed_llm_ungrouped")


@dataclass(frozen=True)
class Shard:
    """What a rank owns of an HF tensor: ``param[local_ranges] = hf_tensor[ranges]``.

    With ``transpose`` the values are transposed first. An expert in a tensor of several experts has one dimension more
    in ``local_ranges``: its index. Other ranks may own the same shard; see ``owner_ranks``.
    """

    hf_name: str
    ranges: Ranges
    local_ranges: Ranges
    transpose: bool = False
    param: str = ""
    rank: int = 0
    is_expert: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """One parameter or buffer of a rank and the shards that fill it completely.

    ``dtype`` is the dtype of the checkpoint (the router's correction bias is fp32 whatever the weights are).
    ``file_shape`` is the shape under which a sharded checkpoint file stores the same bytes, when it differs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...]
    is_buffer: bool = False
    is_expert: bool = False
    file_shape: tuple[int, ...] | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the checkpoint's dtype."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


def plan_problems(hf: HFModelConfig, layout: ParallelLayout) -> list[str]:
    """Every reason why ``layout`` cannot divide this model; experts may also be split (expert TP > 1)."""
    found = layout.problems(hf.num_hidden_layers, hf.n_routed_experts or None, hf.num_attention_heads, hf.vocab_size)
    dense: dict[str, int | None] = {"intermediate_size": hf.intermediate_size}
    if hf.n_shared_experts:
        dense["shared expert width"] = hf.shared_expert_intermediate_size
    experts = {"moe_intermediate_size": hf.moe_intermediate_size} if hf.n_routed_experts else {}
    down = {"kv_lora_rank + qk_rope_head_dim": hf.kv_lora_rank + hf.qk_rope_head_dim, "q_lora_rank": hf.q_lora_rank}
    groups = {"num_key_value_heads": hf.num_key_value_heads}
    return found + layout.width_problems(dense, experts, down if hf.is_mla else {}, {} if hf.is_mla else groups)


def raise_layout_problems(hf: HFModelConfig, layout: ParallelLayout) -> None:
    """ValueError with every reason why ``layout`` cannot divide this model."""
    problems = plan_problems(hf, layout)
    if problems:
        raise ValueError("the layout does not fit the model:\n" + "\n".join(f"  - {line}" for line in problems))


def local_plan(hf: HFModelConfig, layout: ParallelLayout, rank: int, naming: Naming = "core") -> tuple[TensorPlan, ...]:
    """Every tensor of a rank, in model order; layer numbers count from the start of its PP stage.

    With virtual stages names begin with ``chunks.{v}.`` and layers count from the start of their chunk. ``core`` are
    the training engine's names; ``mindspeed_llm`` the checkpoint names of MindSpeed-LLM v2.0.0 with grouped experts,
    where no-op layers leave holes in the numbers, ``mindspeed_llm_ungrouped`` the same with one tensor per expert.
    """
    raise_layout_problems(hf, layout)
    return tuple(_RankPlanner(hf, layout, rank, naming).tensors())


@lru_cache(maxsize=4)
def model_shards(hf: HFModelConfig, layout: ParallelLayout, naming: Naming = "core") -> Mapping[str, tuple[Shard, ...]]:
    """HF name -> its distinct shards, each on the lowest rank that owns it; names in the order of ``hf_tensors``.

    Walks one replica of the dense tensors and one of the experts, whatever the number of ranks.
    """
    raise_layout_problems(hf, layout)
    walks: list[tuple[int, Part]] = [(rank, "dense") for rank in layout.members(0, ("tp", "pp"))]
    walks += [(rank, "experts") for rank in layout.members(0, ("tp", "ep", "pp"), is_expert=True)]
    by_name: dict[str, dict[Ranges, Shard]] = {name: {} for name in hf_tensors(hf)}
    for rank, part in walks:
        for tensor in _RankPlanner(hf, layout, rank, naming, part).tensors():
            for shard in tensor.shards:
                by_name[shard.hf_name].setdefault(shard.ranges, shard)
    found = {name: tuple(shards.values()) for name, shards in by_name.items()}
    for name, original in shared_copies(hf).items():
        found[name] = tuple(replace(shard, hf_name=name) for shard in found[original])
    return MappingProxyType(found)


def owner_ranks(hf: HFModelConfig, layout: ParallelLayout, shard: Shard) -> list[int]:
    """Global ranks that own ``shard`` in the same parameter as ``shard.rank``, ascending.

    Of a tensor that stages share (a tied head, the embedding of an MTP module) only the stage of ``shard.rank`` counts.
    """
    if shard.is_expert:
        return layout.members(shard.rank, ("dp",), is_expert=True)
    is_whole = shape_of(shard.ranges) == hf_tensors(hf)[shard.hf_name][0]
    return layout.members(shard.rank, ("tp", "cp", "dp") if is_whole else ("cp", "dp"))


def slice_rows(tensor: TensorPlan, start: int, stop: int) -> TensorPlan:
    """Rows ``start`` to ``stop`` (dim 0) of ``tensor`` as a tensor of their own, with the parts of its shards there."""
    shards = []
    for shard in tensor.shards:
        first, last = shard.local_ranges[0]
        low, high = max(first, start), min(last, stop)
        if low >= high:
            continue
        ranges = shard.ranges
        if len(shard.local_ranges) == len(ranges):  # otherwise dim 0 counts experts, which HF stores one by one
            top = ranges[0][0] - first
            ranges = ((top + low, top + high), *ranges[1:])
        local_ranges = ((low - start, high - start), *shard.local_ranges[1:])
        shards.append(replace(shard, ranges=ranges, local_ranges=local_ranges))
    return replace(tensor, shape=(stop - start, *tensor.shape[1:]), shards=tuple(shards), file_shape=None)


_Filled = tuple[str, Ranges, Ranges]  # HF name, ranges there, ranges in the local tensor


@dataclass(frozen=True)
class _RankPlanner:
    """Walks the model of one rank; the two naming families differ only in the two attention and expert methods."""

    hf: HFModelConfig
    layout: ParallelLayout
    rank: int
    naming: Naming
    part: Part = "all"
    prefix: str = ""  # of the names of a virtual stage

    def __post_init__(self) -> None:
        if self.naming not in NAMINGS:
            raise ValueError(f"naming is {self.naming!r}; one of {', '.join(NAMINGS)} is needed")

    @cached_property
    def coords(self) -> RankCoords:
        return self.layout.coords(self.rank)

    def tensors(self) -> Iterator[TensorPlan]:
        num_chunks = self.layout.virtual_pipeline_model_parallel_size
        for chunk in range(num_chunks):
            planner = replace(self, prefix=f"chunks.{chunk}.") if num_chunks > 1 else self
            yield from planner._chunk(chunk, chunk == num_chunks - 1)

    def _chunk(self, chunk: int, is_last_chunk: bool) -> Iterator[TensorPlan]:
        hf, pp = self.hf, self.coords.pp
        is_first, is_last = pp == 0 and chunk == 0, is_last_chunk and pp == self.layout.pipeline_model_parallel_size - 1
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

    def _end(self, is_first: bool) -> Iterator[TensorPlan]:
        """What comes before the MTP modules: the final norm, and the embedding that they share."""
        has_file_mtp = self.naming != "core" and self.hf.mtp_num_layers > 0
        final_norm = "final_layernorm.weight" if has_file_mtp else "decoder.final_layernorm.weight"
        yield self._split(final_norm, ["model.norm.weight"], None)
        if self.hf.mtp_num_layers and not is_first:
            yield self._split("embedding.word_embeddings.weight", ["model.embed_tokens.weight"], 0)

    def _head(self, is_first: bool) -> Iterator[TensorPlan]:
        if not self.hf.tie_word_embeddings:
            yield self._split("output_layer.weight", ["lm_head.weight"], 0)
        elif not is_first and not self.hf.mtp_num_layers:  # MTP has a copy of the embedding there already
            yield self._split("output_layer.weight", ["model.embed_tokens.weight"], 0)

    def _mtp(self, depth: int) -> Iterator[TensorPlan]:
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

    def _layer(self, local: str, layer: int) -> Iterator[TensorPlan]:
        source = f"model.layers.{layer}."
        is_moe = self.hf.is_moe_layer(min(layer, self.hf.num_hidden_layers - 1))  # MTP layers are as the last one
        if self.part != "experts":
            yield from self._dense_part(local, source, is_moe)
        if is_moe and self.part != "dense":
            experts = self._ungrouped_experts if self.naming == "mindspeed_llm_ungrouped" else self._grouped_experts
            yield from experts(local + "mlp.experts.", source + "mlp.experts.")
        if is_moe and self.hf.n_shared_experts and self.part != "experts":
            yield from self._mlp(local + "mlp.shared_experts.", source + "mlp.shared_experts.")

    def _dense_part(self, local: str, source: str, is_moe: bool) -> Iterator[TensorPlan]:
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

    def _core_attention(self, local: str, source: str) -> Iterator[TensorPlan]:
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

    def _mindspeed_attention(self, local: str, source: str) -> Iterator[TensorPlan]:
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

    def _grouped_query_attention(self, local: str, source: str) -> Iterator[TensorPlan]:
        """linear_qkv: for each head of keys and values its query heads, then the key, then the value; its rows are cut
        into equal parts.
        """
        weight, hidden = self._query_key_value(source, "weight"), self.hf.hidden_size
        rows = sum(stop - start for _, ((start, stop), *_), _ in weight)
        columns = ((0, hidden),)
        whole = [(name, (*there, *columns), (*here, *columns)) for name, there, here in weight]
        yield self._tensor(local + "linear_qkv.weight", (rows, hidden), whole)
        if self.hf.attention_bias:
            yield self._tensor(local + "linear_qkv.bias", (rows,), self._query_key_value(source, "bias"))
        if self.hf.qk_norm:
            yield self._split(local + "q_layernorm.weight", [source + "q_norm.weight"], None)
            yield self._split(local + "k_layernorm.weight", [source + "k_norm.weight"], None)
        yield self._split(local + "linear_proj.weight", [source + "o_proj.weight"], 1)

    def _query_key_value(self, source: str, kind: str) -> list[_Filled]:
        """Where the rows of this rank's linear_qkv come from."""
        hf = self.hf
        size, per_group = hf.head_dim, hf.num_attention_heads // hf.num_key_value_heads
        all_rows = (hf.num_attention_heads + 2 * hf.num_key_value_heads) * size
        start, stop = _part(all_rows, self.coords.tp, self.layout.tensor_model_parallel_size)
        filled: list[_Filled] = []
        row = 0
        for group in range(hf.num_key_value_heads):
            for name, heads in (("q_proj", per_group), ("k_proj", 1), ("v_proj", 1)):
                low, high = max(row, start), min(row + heads * size, stop)
                if low < high:
                    offset = group * heads * size - row
                    there, here = ((low + offset, high + offset),), ((low - start, high - start),)
                    filled.append((f"{source}{name}.{kind}", there, here))
                row += heads * size
        return filled

    def _mlp(self, local: str, source: str) -> Iterator[TensorPlan]:
        yield self._split(local + "linear_fc1.weight", [source + "gate_proj.weight", source + "up_proj.weight"], 0)
        yield self._split(local + "linear_fc2.weight", [source + "down_proj.weight"], 1)

    def _grouped_experts(self, local: str, source: str) -> Iterator[TensorPlan]:
        # weight1 [E_loc, H, 2F/ETP] (gate then up), weight2 [E_loc, F/ETP, H]: transposed HF weights. MindSpeed-LLM
        # stores the same bytes as (H, -1) and (-1, H): a view, so columns of the file's weight1 are not experts.
        hidden = self.hf.hidden_size
        start, stop = _part(self.hf.moe_intermediate_size, self.coords.etp, self.layout.expert_tensor_parallel_size)
        width, full = stop - start, (0, hidden)
        first: list[_Filled] = []
        second: list[_Filled] = []
        experts = self._local_experts()
        for slot, expert in enumerate(experts):
            here = (slot, slot + 1)
            for name, columns in (("gate_proj", (0, width)), ("up_proj", (width, 2 * width))):
                first.append((f"{source}{expert}.{name}.weight", ((start, stop), full), (here, full, columns)))
            second.append((f"{source}{expert}.down_proj.weight", (full, (start, stop)), (here, (0, width), full)))
        count = len(experts)
        for name, shape, filled in (
            ("weight1", (count, hidden, 2 * width), first),
            ("weight2", (count, width, hidden), second),
        ):
            tensor = self._tensor(local + name, shape, filled, is_expert=True, transpose=True)
            file_shape = (hidden, shape[0] * shape[2]) if name == "weight1" else (shape[0] * shape[1], hidden)
            yield tensor if self.naming == "core" else replace(tensor, file_shape=file_shape)

    def _ungrouped_experts(self, local: str, source: str) -> Iterator[TensorPlan]:
        for slot, expert in enumerate(self._local_experts()):
            here, there = f"{local}local_experts.{slot}.", f"{source}{expert}."
            gate_up = [there + "gate_proj.weight", there + "up_proj.weight"]
            yield self._split(here + "linear_fc1.weight", gate_up, 0, is_expert=True)
            yield self._split(here + "linear_fc2.weight", [there + "down_proj.weight"], 1, is_expert=True)

    def _local_experts(self) -> range:
        start, stop = _part(self.hf.n_routed_experts, self.coords.ep, self.layout.expert_model_parallel_size)
        return range(start, stop)

    def _split(self, name: str, sources: list[str], dim: int | None, is_expert: bool = False) -> TensorPlan:
        """``sources`` stacked on dim 0, each cut along ``dim`` over (expert) TP first; ``dim`` None replicates."""
        if is_expert:
            index, ways = self.coords.etp, self.layout.expert_tensor_parallel_size
        else:
            index, ways = self.coords.tp, self.layout.tensor_model_parallel_size
        filled: list[_Filled] = []
        rows, dtype = 0, ""
        for source in sources:
            shape, dtype = hf_tensors(self.hf)[source]
            ranges = tuple(_part(size, index, ways) if axis == dim else (0, size) for axis, size in enumerate(shape))
            cut = shape_of(ranges)
            filled.append((source, ranges, ((rows, rows + cut[0]), *((0, size) for size in cut[1:]))))
            rows += cut[0]
        return self._tensor(name, (rows, *cut[1:]), filled, dtype, is_expert)

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        filled: Iterable[_Filled],
        dtype: str = "",
        is_expert: bool = False,
        transpose: bool = False,
    ) -> TensorPlan:
        name = self.prefix + name
        shards = tuple(
            Shard(hf_name, ranges, local_ranges, transpose, name, self.rank, is_expert)
            for hf_name, ranges, local_ranges in filled
        )
        return TensorPlan(name, shape, dtype or self.hf.torch_dtype, shards, is_expert=is_expert)


def _part(size: int, index: int, ways: int) -> tuple[int, int]:
    return size * index // ways, size * (index + 1) // ways
