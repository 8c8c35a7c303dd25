"""The data plane: columns of a batch that stay with the worker that made them, and references that stand for them.

The controller's batch has the same columns, but of a kept one only references: int32 [B, 3], the number of the
generated batch, the rank that owns the row, its place there. They are a tensor column like any other, so rows may be
balanced, shuffled, filtered or repeated; a training call is sent the references of its rows, and each rank fetches from
their owners the columns that it needs. A fetch is not collective: owners answer from a thread (``row_server``) whatever
phase they are in, so that no rank waits for one that is late.

Owners keep rows in host memory: 5 bytes a token and 13 more a response token at most, 60 KB for 1,024 + 3,072 tokens or
2 MB a die for 8192 rows on 256 dies; for router replay R3 a byte or two more per token, layer and expert.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.row_server import RowsAsked, RowServer, fetch_rows

REFERENCES = "kept:"  # before the name of a column: its references
ROW_VALUES = "each:"  # before the name of a column: fp32 [B], the value of all response tokens of a row
GENERATED = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "routed_experts")

# Types in which the widest columns are kept and sent; who fetches them gets int64, as the rollout made them.
KEPT_AS = {"input_ids": torch.int32, "attention_mask": torch.bool, "response_mask": torch.bool}
_ROWS_AT_ONCE = 64  # that are compared: their temporaries stay in the processor's cache
_BY_LAYER = "routed_experts"  # [B, L, M, K], kept as [B, M, L, K]: a pipeline stage fetches its own layers only


def references(column: str) -> str:
    """The name that ``column`` has in the controller's batch."""
    return REFERENCES + column


def kept_columns(batch: DataProto) -> list[str]:
    """The columns of ``batch`` that workers keep."""
    names = batch.batch.keys()
    return [name.removeprefix(REFERENCES) for name in names if name.startswith(REFERENCES)]


def has_references(batch: DataProto) -> bool:
    """Whether columns of ``batch`` are kept by workers."""
    return bool(kept_columns(batch))


def controller_batch(output: DataProto) -> DataProto:
    """What the controller works with of a rollout's output: responses int32 and their mask, 5 bytes a token."""
    small = {"responses": output.batch["responses"].int(), "response_mask": output.batch["response_mask"].bool()}
    return DataProto.from_dict(small, output.non_tensor_batch, output.meta_info)


def worker_batch(batch: DataProto, *columns: str) -> DataProto:
    """What a training call is sent: references and ``columns`` [B, R]; a batch without references goes whole.

    A column that has one value for all response tokens of a row, as the advantages of outcome rewards, goes as that.
    """
    if not has_references(batch):
        return batch
    kept = [references(name) for name in kept_columns(batch)]
    request = batch.select(batch_keys=kept, non_tensor_batch_keys=[])
    is_response_BR = batch.batch["response_mask"].bool()
    for name in columns:
        values_B = _row_values(batch.batch[name], is_response_BR)
        request.batch[name if values_B is None else ROW_VALUES + name] = (
            batch.batch[name] if values_B is None else values_B
        )
    return request


class KeptRows:
    """The rows that this rank owns, and its way to those of the others; building it is collective.

    Args:
        group: all ranks.
        device: where fetched rows go, but for the experts of R3, which stay in host memory.
        timeout_s: an owner that sends nothing for so long is an error.
        first_rank: of those that generate.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout_s: float, *, first_rank: int = 0
    ) -> None:
        self._rank, self._first_rank = group.rank(), first_rank
        self._device = device
        self._timeout_s = timeout_s
        self._batch = 0
        self._columns: dict[tuple[int, str], np.ndarray] = {}
        self._open(group)

    def _open(self, group: dist.ProcessGroup) -> None:
        """Answer from now on, and learn where the others do."""
        self._server = RowServer(_own_host(), self._rows_of)
        self._addresses = [self._server.address] * group.size()
        dist.all_gather_object(self._addresses, self._server.address, group=group)
        neighbour = (self._rank + 1) % group.size()
        # A blocked network shows here, not later.
        fetch_rows({neighbour: (self._addresses[neighbour], [])}, self._timeout_s)

    def keep_generated(self, output: DataProto, replica_size: int, *, keeps_earlier: bool = False) -> DataProto:
        """Begins a batch with this rank's share of its replica's ``output``; returns what goes to the controller.

        All ``replica_size`` ranks of a rollout replica have the same output; they own its rows in turn. With
        ``keeps_earlier`` the rows of earlier batches stay: a step may train on those of several generations.
        """
        if not keeps_earlier:
            self.drop()
        self._batch += 1
        place = (self._rank - self._first_rank) % replica_size
        first = self._rank - place
        names = [name for name in GENERATED if name in output.batch]
        for name in names:
            self._columns[self._batch, name] = _kept_form(name, output.batch[name][place::replica_size])
        rows = torch.arange(len(output))
        reference = self._references(first + rows % replica_size, rows // replica_size)
        batch = controller_batch(output)
        batch.batch.update({references(name): reference for name in names})
        return batch

    def keep(self, name: str, values: Tensor) -> DataProto:
        """Owns a new column of the rows of this step, whichever generation they are of; returns its references."""
        self._columns[self._batch, name] = _kept_form(name, values)
        rows = torch.arange(len(values))
        return DataProto.from_dict({references(name): self._references(torch.full_like(rows, self._rank), rows)})

    def fetch(
        self, request: DataProto, columns: Sequence[str], layers: tuple[Sequence[int], int] | None = None
    ) -> DataProto:
        """``request`` with those of ``columns`` that it has references of, in place of all references.

        Args:
            columns: what this rank needs of the rows; response_mask is needed where a column came as one value a row.
            layers: of the experts of R3 only these MoE layers, and how many there must be; they are then [B, L, m, K].

        Raises:
            RowsUnavailableError: an owner is gone, or has generated another batch since.
        """
        if not len(request):
            raise ValueError("a request without rows: what it would fetch has no shape")
        present = [name for name in columns if references(name) in request.batch]
        kept = {name: request.batch[references(name)].numpy() for name in present}
        fetched = {name: self._used_form(name, rows) for name, rows in self._gather(kept, layers).items()}
        sent = {name: t.to(self._device) for name, t in request.batch.items() if not name.startswith(REFERENCES)}
        for name in [name for name in sent if name.startswith(ROW_VALUES)]:
            values_B = sent.pop(name)
            sent[name.removeprefix(ROW_VALUES)] = values_B[:, None] * fetched["response_mask"]
        return DataProto.from_dict(fetched | sent, request.non_tensor_batch, request.meta_info)

    def drop(self, before: int | None = None) -> None:
        """Frees the rows, or those of generated batches with a number below ``before``.

        Only when no call that may fetch them is under way on any rank.
        """
        self._columns = {key: rows for key, rows in self._columns.items() if before is not None and key[0] >= before}

    def close(self) -> None:
        """Ends the server."""
        self._server.close()

    def _gather(
        self, kept: Mapping[str, np.ndarray], layers: tuple[Sequence[int], int] | None
    ) -> dict[str, np.ndarray]:
        """Rows of each column in the order of its references [B, 3], those of this rank without a detour."""
        asked: dict[int, list[RowsAsked]] = {}
        places: dict[int, list[tuple[str, np.ndarray]]] = {}
        for name, reference in kept.items():
            chosen, num_layers = layers if layers is not None and name == _BY_LAYER else (None, 0)
            for number, rank in np.unique(reference[:, :2], axis=0).tolist():
                (rows,) = np.nonzero((reference[:, 0] == number) & (reference[:, 1] == rank))
                slots = tuple(reference[rows, 2].tolist())
                asked.setdefault(rank, []).append(
                    RowsAsked(number, name, slots, None if chosen is None else tuple(chosen), num_layers)
                )
                places.setdefault(rank, []).append((name, rows))
        mine = [self._rows_of(rows) for rows in asked.get(self._rank, [])]
        # Each rank begins with its neighbour, so that the first owner is not everybody's first.
        others = sorted(asked.keys() - {self._rank}, key=lambda rank: (rank - self._rank) % len(self._addresses))
        answers = fetch_rows({rank: (self._addresses[rank], asked[rank]) for rank in others}, self._timeout_s)
        gathered: dict[str, np.ndarray] = {}
        for rank, arrays in (answers | {self._rank: mine}).items():
            for (name, rows), array in zip(places.get(rank, []), arrays, strict=True):
                if name not in gathered:
                    gathered[name] = np.empty((len(kept[name]), *array.shape[1:]), array.dtype)
                gathered[name][rows] = array
        return gathered

    def _rows_of(self, asked: RowsAsked) -> np.ndarray:
        """ValueError when the rows are not here; runs in the server's thread too, beside ``keep`` and ``drop``."""
        column = self._columns.get((asked.batch, asked.column))
        if column is None:
            held = list(self._columns)  # one step, as the other thread may add to it
            names = ", ".join(name for batch, name in held if batch == self._batch)
            state = f"batch {self._batch}, of which {names or 'nothing'} is kept"
            raise ValueError(
                f"{asked.column} of generated batch {asked.batch} was asked for, but the last one is {state}; rows are "
                "kept until the next generate_sequences: train on them before that"
            )
        if asked.slots and not 0 <= min(asked.slots) <= max(asked.slots) < len(column):
            raise ValueError(f"rows {asked.slots} of {len(column)} were asked for")
        if asked.layers is None:
            return column[list(asked.slots)]
        if column.shape[1] != asked.num_layers:
            raise ValueError(f"router replay R3: the rollout has {column.shape[1]} MoE layers, not {asked.num_layers}")
        return column[np.ix_(asked.slots, asked.layers)]

    def _references(self, owners_B: Tensor, slots_B: Tensor) -> Tensor:
        return torch.stack([torch.full_like(owners_B, self._batch), owners_B, slots_B], dim=1).int()

    def _used_form(self, name: str, rows: np.ndarray) -> Tensor:
        values = torch.from_numpy(rows)
        if name == _BY_LAYER:
            return values.movedim(1, 2)
        return values.to(self._device, torch.int64 if name in KEPT_AS else values.dtype)


def _row_values(values_BR: Tensor, is_response_BR: Tensor) -> Tensor | None:
    """[B] when the response tokens of each row have one value, else None; beside them values mean nothing."""
    values, is_response = values_BR.numpy(), is_response_BR.numpy()
    of_rows = np.take_along_axis(values, is_response.argmax(-1)[:, None], axis=1)
    for first in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        if not ((values[rows] == of_rows[rows]) | ~is_response[rows]).all():
            return None
    return torch.from_numpy(of_rows[:, 0])


def _kept_form(name: str, values: Tensor) -> np.ndarray:
    """A copy in host memory, as it will be sent."""
    if name == _BY_LAYER:
        values = values.movedim(2, 1)
    dtype = KEPT_AS.get(name, values.dtype)
    return values.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format).numpy()


def _own_host() -> str:
    """The address of this host on the network of the rendezvous; a group made without one is of this host alone."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: only asks the routing table
        return str(probe.getsockname()[0])
