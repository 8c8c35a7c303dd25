"""The arithmetic of parallel layouts: coordinates of ranks in TP x CP x DP x PP and ETP x EP x EDP x PP, and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class RankCoords:
    """Coordinates of one rank in the decoder grid (tp, cp, dp, pp) and in the expert grid (etp, ep, edp, pp)."""

    tp: int
    pp: int
    dp: int
    cp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every parallel axis of one training job, the order of its ranks, and the layers of its stages.

    Ranks: ``order`` names the axes, the left-most varying fastest (Megatron's ``tp-cp-ep-dp-pp``). Dense weights live
    in the grid TP x CP x DP x PP. The experts have a grid of their own, ETP x EP x EDP x PP, laid over the same ranks:
    with ``expert_tensor_parallel_size == 1`` the tensor-parallel ranks join expert parallelism, which is what MindSpeed
    calls ``moe_tp_extend_ep`` (its EP flag times TP is ``expert_model_parallel_size`` here).

    Layers: ``virtual_pipeline_model_parallel_size`` V cuts the layers of each stage into V chunks; the model runs
    through chunk 0 of every stage, then chunk 1 of every stage, and so on. ``num_layer_list`` gives the layers of each
    stage, or ``num_layers_in_{first,last}_pipeline_stage`` those of the ends, or
    ``account_for_{embedding,loss}_in_pipeline_split`` count what the ends hold besides as one layer each.
    ``noop_layers`` (MindSpeed) are slots that count as layers in all of these and hold none.

    Weights: with ``mla_down_proj_column_parallel`` the down-projections of latent attention are split over TP by their
    outputs; otherwise every tensor-parallel rank holds them whole.
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    num_layer_list: tuple[int, ...] | None = None
    virtual_pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    noop_layers: tuple[int, ...] = ()
    mla_down_proj_column_parallel: bool = False
    order: str = DEFAULT_ORDER

    @staticmethod
    def from_json(sizes: Mapping[str, Any]) -> ParallelLayout:
        """The layout whose ``dataclasses.asdict`` was written as JSON; ``TypeError`` for a field that is not known."""
        fields: dict[str, Any] = {key: tuple(size) if isinstance(size, list) else size for key, size in sizes.items()}
        return ParallelLayout(**fields)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the dense parameters, context-parallel ranks not counted."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def expert_data_parallel_size(self) -> int:
        return self.world_size // (
            self.expert_tensor_parallel_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        )

    def problems(
        self,
        num_layers: int | None = None,
        num_experts: int | None = None,
        num_attention_heads: int | None = None,
        vocab_size: int | None = None,
    ) -> list[str]:
        """Return one sentence for each size that does not divide; empty when the layout can be built."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        cp, ep, etp = self.context_parallel_size, self.expert_model_parallel_size, self.expert_tensor_parallel_size
        found = [
            f"{name} is {size}; it must be at least 1"
            for name, size in (
                ("world_size", self.world_size),
                ("tensor_model_parallel_size", tp),
                ("pipeline_model_parallel_size", pp),
                ("context_parallel_size", cp),
                ("expert_model_parallel_size", ep),
                ("expert_tensor_parallel_size", etp),
                ("virtual_pipeline_model_parallel_size", self.virtual_pipeline_model_parallel_size),
            )
            if size < 1
        ]
        if found:
            return found
        if self.world_size % (tp * pp * cp):
            found.append(
                f"world size {self.world_size} is not a multiple of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}"
            )
        if self.world_size % (etp * ep * pp):
            found.append(
                f"world size {self.world_size} is not a multiple of expert TP {etp} x EP {ep} x PP {pp} = "
                f"{etp * ep * pp}"
            )
        if not found:
            found.extend(self._order_problems())
        if num_experts is not None and num_experts % ep:
            found.append(f"{num_experts} experts do not divide over expert_model_parallel_size {ep}")
        for what, size in (("attention heads", num_attention_heads), ("vocabulary entries", vocab_size)):
            if size is not None and size % tp:
                found.append(f"{size} {what} do not divide over tensor_model_parallel_size {tp}")
        found.extend(self._stage_problems())
        if num_layers is not None:
            found.extend(self._layer_problems(num_layers))
        return found

    def width_problems(
        self,
        dense: Mapping[str, int | None],
        experts: Mapping[str, int | None],
        down_projections: Mapping[str, int | None],
        query_groups: Mapping[str, int],
    ) -> list[str]:
        """Return one sentence for each width of the model, by its name, that its group of ranks cannot divide.

        ``dense`` widths are cut by TP, those of ``experts`` by expert TP, ``down_projections`` (latent attention's) by
        TP with ``mla_down_proj_column_parallel``. ``query_groups`` are cut by TP or copied. None: the model has none.
        """
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        cut = down_projections if self.mla_down_proj_column_parallel else {}
        by_tp, by_etp = f"tensor_model_parallel_size {tp}", f"expert_tensor_parallel_size {etp}"
        found = [f"{name} {width} does not divide over {by_tp}" for name, width in dense.items() if (width or 0) % tp]
        found += [f"{name} {size} does not divide over {by_etp}" for name, size in experts.items() if (size or 0) % etp]
        found += [
            f"{name} {width} does not divide over {by_tp}, as mla_down_proj_column_parallel needs"
            for name, width in cut.items()
            if (width or 0) % tp
        ]
        return found + [
            f"{name} {number} neither divides over {by_tp} nor divides it"
            for name, number in query_groups.items()
            if number % tp and tp % number
        ]

    def coords(self, rank: int) -> RankCoords:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        dense, expert = _unravel(rank, self._grid(False)), _unravel(rank, self._grid(True))
        return RankCoords(
            tp=dense["tp"],
            pp=dense["pp"],
            dp=dense["dp"],
            cp=dense["cp"],
            ep=expert["ep"],
            etp=expert["tp"],
            edp=expert["dp"],
        )

    def stage(self, rank: int) -> int:
        return _unravel(rank, self._grid(False))["pp"]

    def members(self, rank: int, axes: tuple[str, ...], is_expert: bool = False) -> list[int]:
        """Global ranks that differ from ``rank`` in ``axes`` only, of one grid, ascending; in closed form.

        In the expert grid "tp" is the expert tensor parallel axis and "dp" the replicas of an expert.
        """
        base, ranks, stride = rank, [0], 1
        for axis, size in self._grid(is_expert):
            if axis in axes:
                base -= rank // stride % size * stride
                ranks = [member + step * stride for step in range(size) for member in ranks]
            stride *= size
        return [base + member for member in ranks]

    def stage_layer_counts(self, num_layers: int) -> tuple[int, ...]:
        """Slots of each pipeline stage (layers and no-op layers, all chunks together), first stage first."""
        problems = self._stage_problems() + self._layer_problems(num_layers)
        if problems:
            raise ValueError("; ".join(problems))
        counts = self._counts(num_layers)
        assert counts is not None, "no problem was found"
        return counts

    def chunk_slots(self, pp_rank: int, vp_stage: int, num_layers: int) -> tuple[int | None, ...]:
        """Return what each slot of chunk ``vp_stage`` of stage ``pp_rank`` holds: a global layer id, or None for a
        no-op layer.

        Layer ids count real layers only, as Hugging Face names do; ``num_layers`` is their number.
        """
        num_chunks = self.virtual_pipeline_model_parallel_size
        sizes = [count // num_chunks for count in self.stage_layer_counts(num_layers)]
        first = sum(sizes) * vp_stage + sum(sizes[:pp_rank])
        noops = frozenset(self.noop_layers)
        layer = first - sum(slot < first for slot in noops)
        slots: list[int | None] = []
        for slot in range(first, first + sizes[pp_rank]):
            slots.append(None if slot in noops else layer)
            layer += slot not in noops
        return tuple(slots)

    def chunk_layers(self, pp_rank: int, vp_stage: int, num_layers: int) -> tuple[int, ...]:
        """Global ids of the layers of one chunk, in the order in which they run."""
        return tuple(layer for layer in self.chunk_slots(pp_rank, vp_stage, num_layers) if layer is not None)

    def stage_layers(self, pp_rank: int, num_layers: int) -> tuple[int, ...]:
        """Global ids of the layers of pipeline stage ``pp_rank``, chunk after chunk."""
        chunks = range(self.virtual_pipeline_model_parallel_size)
        return tuple(layer for chunk in chunks for layer in self.chunk_layers(pp_rank, chunk, num_layers))

    def _grid(self, is_expert: bool) -> list[tuple[str, int]]:
        """(axis, size) of one grid, fastest first."""
        sizes = {"pp": self.pipeline_model_parallel_size}
        if is_expert:
            sizes |= {"tp": self.expert_tensor_parallel_size, "ep": self.expert_model_parallel_size}
            sizes |= {"cp": 1, "dp": self.expert_data_parallel_size}
        else:
            sizes |= {"tp": self.tensor_model_parallel_size, "cp": self.context_parallel_size}
            sizes |= {"ep": 1, "dp": self.data_parallel_size}
        return [(axis, sizes[axis]) for axis in self.order.split("-")]

    def _order_problems(self) -> list[str]:
        if sorted(self.order.split("-")) != sorted(AXES):
            return [f"order is {self.order!r}; it must name each of {', '.join(AXES)} once, such as {DEFAULT_ORDER!r}"]
        before = [
            prod(size for _, size in grid[: [axis for axis, _ in grid].index("pp")])
            for grid in (self._grid(False), self._grid(True))
        ]
        if self.pipeline_model_parallel_size > 1 and before[0] != before[1]:
            return [
                f"order {self.order!r} puts the pipeline stages {before[0]} ranks apart for dense weights and "
                f"{before[1]} for experts; end it with pp"
            ]
        return []

    def _stage_problems(self) -> list[str]:
        """Return what is wrong with the description of the stages, independent of the model."""
        found = []
        pp = self.pipeline_model_parallel_size
        ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
        if self.num_layer_list is not None:
            shown = ",".join(map(str, self.num_layer_list))
            if len(self.num_layer_list) != pp:
                found.append(f"num_layer_list {shown} has {len(self.num_layer_list)} stages; PP is {pp}")
            if any(count < 1 for count in self.num_layer_list):
                found.append(f"num_layer_list {shown} has a stage without layers")
            if ends != (None, None):
                found.append("num_layer_list and num_layers_in_{first,last}_pipeline_stage exclude each other")
        if any(self._counted_ends) and pp > 1:
            others = self.num_layer_list is not None or ends != (None, None)
            if others or self.virtual_pipeline_model_parallel_size > 1:
                found.append(
                    "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split shorten the end "
                    "stages of an even split; with virtual stages or given numbers of layers leave them out"
                )
        if self.virtual_pipeline_model_parallel_size > 1 and pp == 1:
            found.append(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size} with PP 1; "
                "chunks need at least 2 stages"
            )
        for name, size in zip(("first", "last"), ends, strict=True):
            if size is not None and (size < 1 or pp == 1):
                found.append(f"num_layers_in_{name}_pipeline_stage is {size} with PP {pp}; it needs layers and PP > 1")
        return found

    def _layer_problems(self, num_layers: int) -> list[str]:
        num_slots = num_layers + len(self.noop_layers)
        stray = [slot for slot in self.noop_layers if not 0 <= slot < num_slots]
        if stray or len(set(self.noop_layers)) != len(self.noop_layers):
            return [f"noop_layers {list(self.noop_layers)} must be different numbers in 0..{num_slots - 1}"]
        pp, num_chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        what = f"{num_layers} layers" + (f" and {len(self.noop_layers)} no-op layers" if self.noop_layers else "")
        counts = self._counts(num_layers)
        if counts is None or any(count < 1 for count in counts):
            ends = (self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage)
            given = "" if ends == (None, None) else f" with {ends[0]} in the first and {ends[1]} in the last"
            return [
                f"{what} do not divide over pipeline_model_parallel_size {pp}{given}; "
                f"give num_layer_list, {pp} counts that sum to {num_slots}"
            ]
        found = []
        if sum(counts) != num_slots:
            shown = ",".join(map(str, counts))
            found.append(f"num_layer_list {shown} sums to {sum(counts)}; the model has {what}")
        uneven = [count for count in counts if count % num_chunks]
        if uneven:
            found.append(
                f"a stage of {uneven[0]} layers does not divide into virtual_pipeline_model_parallel_size "
                f"{num_chunks} chunks"
            )
        return found

    @property
    def _counted_ends(self) -> tuple[bool, bool]:
        return (self.account_for_embedding_in_pipeline_split, self.account_for_loss_in_pipeline_split)

    def _counts(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the slots of each stage; None when the rest does not divide over the stages without a given size."""
        if self.num_layer_list is not None:
            return tuple(self.num_layer_list)
        if any(self._counted_ends) and self.pipeline_model_parallel_size > 1:
            slots = num_layers + len(self.noop_layers) + sum(self._counted_ends)
            if slots % self.pipeline_model_parallel_size:
                return None
            even = [slots // self.pipeline_model_parallel_size] * self.pipeline_model_parallel_size
            even[0] -= self._counted_ends[0]
            even[-1] -= self._counted_ends[1]
            return tuple(even)
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        left = num_layers + len(self.noop_layers) - (first or 0) - (last or 0)
        num_stages = self.pipeline_model_parallel_size - (first is not None) - (last is not None)
        if left < 0 or (left % num_stages if num_stages else left):
            return None
        middle = (left // num_stages,) * num_stages if num_stages else ()
        return (() if first is None else (first,)) + middle + (() if last is None else (last,))


def _unravel(rank: int, grid: list[tuple[str, int]]) -> dict[str, int]:
    coords = {}
    for axis, size in grid:
        rank, coords[axis] = divmod(rank, size)
    return coords
