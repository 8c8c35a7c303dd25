"""Where every rank stands: the arithmetic of TP x CP x DP x PP and ETP x EP x EDP x PP, without torch."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Sizes of every parallel axis of one training job.

    Rank order is Megatron's ``tp-cp-ep-dp-pp`` with the left-most axis varying fastest. The experts have a grid of
    their own: with ``expert_tensor_parallel_size == 1`` the tensor-parallel ranks join expert parallelism, which is
    what MindSpeed calls ``moe_tp_extend_ep`` (its EP flag times TP is ``expert_model_parallel_size`` here).
    """

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    num_layer_list: tuple[int, ...] | None = None

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the dense parameters."""
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def expert_data_parallel_size(self) -> int:
        """Number of replicas of each expert."""
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
        """Everything that does not divide, one sentence each; empty when the layout can be built."""
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
        if etp != 1:
            found.append(f"expert_tensor_parallel_size is {etp}; only 1 is supported (the TP ranks join EP)")
        if cp != 1:
            found.append(f"context_parallel_size is {cp}; only 1 is supported")
        if num_experts is not None and num_experts % ep:
            found.append(f"{num_experts} experts do not divide over expert_model_parallel_size {ep}")
        for what, size in (("attention heads", num_attention_heads), ("vocabulary entries", vocab_size)):
            if size is not None and size % tp:
                found.append(f"{size} {what} do not divide over tensor_model_parallel_size {tp}")
        if num_layers is not None:
            found.extend(self._layer_problems(num_layers))
        return found

    def _layer_problems(self, num_layers: int) -> list[str]:
        pp = self.pipeline_model_parallel_size
        if self.num_layer_list is None:
            if num_layers % pp:
                return [
                    f"{num_layers} layers do not divide over pipeline_model_parallel_size {pp}; "
                    f"give num_layer_list, {pp} counts that sum to {num_layers}"
                ]
            return []
        found = []
        shown = ",".join(map(str, self.num_layer_list))
        if len(self.num_layer_list) != pp:
            found.append(f"num_layer_list {shown} has {len(self.num_layer_list)} stages; PP is {pp}")
        if sum(self.num_layer_list) != num_layers:
            found.append(
                f"num_layer_list {shown} sums to {sum(self.num_layer_list)}; the model has {num_layers} layers"
            )
        if any(count < 1 for count in self.num_layer_list):
            found.append(f"num_layer_list {shown} has a stage without layers")
        return found

    def coords(self, rank: int) -> RankCoords:
        """Coordinates of global ``rank``."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size}")
        tp, rest = rank % self.tensor_model_parallel_size, rank // self.tensor_model_parallel_size
        cp, rest = rest % self.context_parallel_size, rest // self.context_parallel_size
        dp, pp = rest % self.data_parallel_size, rest // self.data_parallel_size
        etp, rest = rank % self.expert_tensor_parallel_size, rank // self.expert_tensor_parallel_size
        ep, rest = rest % self.expert_model_parallel_size, rest // self.expert_model_parallel_size
        edp = rest % self.expert_data_parallel_size
        return RankCoords(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, edp=edp)

    def stage_layer_counts(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each pipeline stage, first stage first."""
        problems = self._layer_problems(num_layers)
        if problems:
            raise ValueError("; ".join(problems))
        if self.num_layer_list is not None:
            return tuple(self.num_layer_list)
        pp = self.pipeline_model_parallel_size
        return (num_layers // pp,) * pp

    def stage_layers(self, pp_rank: int, num_layers: int) -> range:
        """Global ids of the layers of pipeline stage ``pp_rank``."""
        counts = self.stage_layer_counts(num_layers)
        first = sum(counts[:pp_rank])
        return range(first, first + counts[pp_rank])
