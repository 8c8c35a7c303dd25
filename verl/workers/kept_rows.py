"""Rows of a generated batch that stay with the workers, and reach the rank that trains on them without the controller.

A generated row has one home: a rank of the replica that generated it, rows dealt out in turn over the replica's
tensor-parallel ranks. The controller holds row numbers; a training call carries those of its data-parallel replica, and
each rank asks the homes for its rows. So any order, choice or repetition of rows, and any two layouts, work alike.

Homes keep the rows on their device: 100 KB a row of 4096 tokens, 6.5 MB a die for 8192 rows on 256 dies, 50 MB at 32K
tokens. The controller gets responses and their mask (it decodes and scores them), 5 bytes a token, and row numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto

ROWS = "kept_rows"  # tensor column of the controller's batch: number of the row in the generated batch, int64 [B]
HANDLE = "kept_batch"  # its entry in meta_info
_KEPT_COLUMNS = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "routed_experts")


@dataclass(frozen=True)
class KeptBatch:
    """What the controller holds in place of the tensors.

    Attributes:
        number: counts the generated batches of this run; one is kept at a time.
        rows_per_replica: rows that every rollout replica generated, padding of the batch included.
    """

    number: int
    rows_per_replica: int


def worker_batch(batch: DataProto, *columns: str) -> DataProto:
    """What a training call is sent: row numbers and ``columns`` where the workers kept the rest, else all of it."""
    if HANDLE not in batch.meta_info:
        return batch
    return batch.select(batch_keys=[ROWS, *columns], non_tensor_batch_keys=[])


class KeptRows:
    """This rank's part of the kept batch.

    Args:
        group: all ranks, numbered as the rollout engine numbers them.
        replica_size: ranks of a rollout replica (its tensor-parallel size); all of them generate the same rows.
        device: where rows are kept and exchanged.
    """

    def __init__(self, group: dist.ProcessGroup, replica_size: int, device: torch.device) -> None:
        self._group = group
        self._replica_size = replica_size
        self._device = device
        self._batch = KeptBatch(0, 0)
        self._columns: dict[str, Tensor] = {}  # [rows that have their home here, ...] each

    def keep(self, output: DataProto) -> DataProto:
        """Takes the training tensors of this replica's ``output``; what comes back is all the controller gets."""
        num_rows = len(output)
        replica, place = divmod(self._group.rank(), self._replica_size)
        self._batch = KeptBatch(self._batch.number + 1, num_rows)
        present = [name for name in _KEPT_COLUMNS if name in output.batch]
        mine = {name: output.batch[name][place :: self._replica_size] for name in present}
        self._columns = {name: rows.to(self._device, copy=True).contiguous() for name, rows in mine.items()}
        small = {
            "responses": output.batch["responses"].int(),
            "response_mask": output.batch["response_mask"].bool(),
            ROWS: torch.arange(num_rows) + replica * num_rows,
        }
        return DataProto.from_dict(small, output.non_tensor_batch, output.meta_info | {HANDLE: self._batch})

    def fetch(self, request: DataProto) -> DataProto:
        """``request`` with every kept column of its rows, on the device; collective over all ranks.

        A request without a handle is one that has its tensors: it is moved to the device and nothing is exchanged.
        Raises ValueError on every rank when the batch of the handle is no longer kept.
        """
        if HANDLE not in request.meta_info:
            return request.to(self._device)
        self._require(request.meta_info[HANDLE])
        order, slots, counts = self._by_home(request.batch[ROWS])
        asked, num_asked = self._exchange(slots, counts)
        names = list(self._columns)
        packed = torch.cat([_as_bytes(self._columns[name]) for name in names], dim=1)
        answers, _ = self._exchange(packed[asked], num_asked, counts)
        table = torch.empty_like(answers)
        table[order] = answers
        widths = [_as_bytes(self._columns[name]).size(1) for name in names]
        columns = {
            name: _from_bytes(part, self._columns[name])
            for name, part in zip(names, table.split(widths, dim=1), strict=True)
        }
        sent = {name: tensor.to(self._device) for name, tensor in request.batch.items() if name != ROWS}
        return DataProto.from_dict(columns | sent, request.non_tensor_batch, request.meta_info)

    def write(self, request: DataProto, name: str, values_BR: Tensor | None) -> None:
        """Sends a new fp32 column home; collective over all ranks.

        Args:
            request: the call whose rows ``values_BR`` [B, R] belong to.
            values_BR: None on ranks that have nothing to send. Each row is sent by one rank; those that nobody
                sends are NaN.
        """
        self._require(request.meta_info[HANDLE])
        rows = request.batch[ROWS] if values_BR is not None else torch.empty(0, dtype=torch.int64)
        column = torch.full(self._columns["response_mask"].shape, torch.nan, device=self._device)
        values_BR = column[:0] if values_BR is None else values_BR.to(self._device)
        order, slots, counts = self._by_home(rows)
        slots, num_received = self._exchange(slots, counts)
        values, _ = self._exchange(values_BR[order], counts, num_received)
        column[slots] = values
        self._columns[name] = column

    def drop(self) -> None:
        """Frees the rows; their handle is stale from now on."""
        self._columns = {}

    def _require(self, handle: KeptBatch) -> None:
        if handle != self._batch or not self._columns:
            state = f"batch {self._batch.number}" + ("" if self._columns else ", which has been freed since")
            raise ValueError(
                f"the controller asks for rows of generated batch {handle.number}, but the workers' last one is {state}"
                "; rows are kept until update_actor or the next generate_sequences: train on them before that, or set "
                "actor_rollout_ref.rollout.device_handover=false"
            )

    def _by_home(self, rows: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Order of ``rows`` by home rank, their places at home in that order, and how many each rank is home to."""
        replica, row = rows // max(self._batch.rows_per_replica, 1), rows % max(self._batch.rows_per_replica, 1)
        rank, slot = replica * self._replica_size + row % self._replica_size, row // self._replica_size
        order = rank.argsort(stable=True)
        counts = rank.bincount(minlength=self._group.size())
        assert len(counts) == self._group.size(), f"rows {rows.tolist()} go beyond {self._batch}"
        return order.to(self._device), slot[order].to(self._device), counts.tolist()

    def _exchange(
        self, values_N: Tensor, counts: list[int], num_received: list[int] | None = None
    ) -> tuple[Tensor, list[int]]:
        """Sends ``counts[r]`` of the values to rank r, in order; returns what came, by rank, and how many from each."""
        if num_received is None:
            ones = [1] * self._group.size()
            num_received = self._all_to_all(torch.tensor(counts, device=self._device), ones, ones).tolist()
        return self._all_to_all(values_N, counts, num_received), num_received

    def _all_to_all(self, values_N: Tensor, counts: list[int], num_received: list[int]) -> Tensor:
        received = values_N.new_empty((sum(num_received), *values_N.shape[1:]))
        dist.all_to_all_single(received, values_N.contiguous(), num_received, counts, group=self._group)
        return received


def _as_bytes(column: Tensor) -> Tensor:
    """[rows, bytes of a row]."""
    return column.flatten(1).view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_as_bytes``, with dtype and row shape of ``like``."""
    aligned = rows.clone(memory_format=torch.contiguous_format)  # one row of a slice is contiguous wherever it starts
    return aligned.view(like.dtype).view(len(rows), *like.shape[1:])
