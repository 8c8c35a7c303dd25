"""How the experts of a batch's tokens are chosen when it is scored and trained on: by the gate, or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.router_replay import MicroBatchRouting, RouterReplay
from verl.protocol import DataProto
from verl.utils.megatron.packed_batch import PackedMicroBatch
from verl.workers.actor.routing_rows import FROM_ROLLOUT, RoutingRows, with_row_numbers


class Routing:
    """No replay: the gate chooses. The others override what they change.

    Attributes:
        columns: what it reads of a batch beside the tokens.
        rows: the choices that are replayed, by row of the batch.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    rows: RoutingRows | None = None

    def begin_scoring(self, data: DataProto) -> DataProto:
        """The batch whose micro-batches ``of_micro_batch`` is asked about."""
        return data

    def end_scoring(self, data: DataProto, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Called after the last micro-batch."""

    def begin_update(self, data: DataProto) -> DataProto:
        """As ``begin_scoring``; its rows may come in any order, in several mini-batches."""
        return data

    def end_update(self) -> None:
        """Called after the last mini-batch."""
        self.rows = None

    def of_micro_batch(self, micro: PackedMicroBatch, data: DataProto) -> MicroBatchRouting | None:
        """The tracing or replaying of ``micro``, which was packed from ``data``; None: the gate chooses."""
        return None


class TracedRouting(Routing):
    """R2: updates replay what the pass of the old log-probs chose."""

    def __init__(self, replay: RouterReplay, groups: ProcessGroups, device: torch.device) -> None:
        self._replay, self._groups, self._device = replay, groups, device

    def begin_scoring(self, data: DataProto) -> DataProto:
        self.rows = None
        return data

    def end_scoring(self, data: DataProto, micro_batches: Sequence[PackedMicroBatch]) -> None:
        self.rows = RoutingRows.traced(self._replay, micro_batches, data, self._groups, self._device)

    def begin_update(self, data: DataProto) -> DataProto:
        if self.rows is None:
            raise ValueError("router replay: compute_log_prob must record the rows before update_policy")
        self.rows.check(data)
        return with_row_numbers(data)

    def of_micro_batch(self, micro: PackedMicroBatch, data: DataProto) -> MicroBatchRouting:
        return self._replay.record() if self.rows is None else self.rows.replayed(self._replay, micro, data)


class RolloutRouting(Routing):
    """R3: every pass replays what the rollout chose.

    Args:
        layers: the global numbers of this stage's MoE layers.
        all_layers: those of the model.
    """

    columns = (FROM_ROLLOUT,)

    def __init__(self, replay: RouterReplay, layers: Sequence[int], all_layers: Sequence[int]) -> None:
        self._replay, self._layers, self._all_layers = replay, layers, all_layers

    def begin_scoring(self, data: DataProto) -> DataProto:
        self.rows = RoutingRows.from_rollout(data, self._layers, self._all_layers)
        return with_row_numbers(data)

    def end_scoring(self, data: DataProto, micro_batches: Sequence[PackedMicroBatch]) -> None:
        self.rows = None

    def begin_update(self, data: DataProto) -> DataProto:
        return self.begin_scoring(data)

    def of_micro_batch(self, micro: PackedMicroBatch, data: DataProto) -> MicroBatchRouting:
        assert self.rows is not None, "begin_scoring or begin_update comes first"
        return self.rows.replayed(self._replay, micro, data)
