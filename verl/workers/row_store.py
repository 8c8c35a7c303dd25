"""The row store: columns of a batch that stay with the worker that made them, and how other workers fetch them.

The controller's batch has references to these remote columns (``RowRefs``), so it may balance, shuffle, filter or
repeat rows like those of any other column. A training call is sent the references of its rows, and each rank fetches
the columns that it needs from their owners. A fetch is not collective: owners answer from a thread (``row_server``)
whatever phase they are in, so no rank waits for one that is late.

Owners keep rows in host memory: 5 bytes a token and at most 13 more a response token, which is 60 KB for 1,024 + 3,072
tokens or 2 MB a die for 8192 rows on 256 dies. Router replay R3 adds a byte or two per token, layer and expert.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.row_refs import BATCH, RANK, SLOT, RowRefs
from verl.workers.row_server import RowServer, RowsRequest, fetch_rows

GENERATED_COLUMNS = (
    *("input_ids", "attention_mask", "response_mask", "row_starts"),
    *("rollout_log_probs", "routed_experts"),
)

# Types in which the widest columns are stored and sent; a fetch returns int64, as the rollout made them.
STORED_DTYPES = {
    **dict.fromkeys(("input_ids", "row_starts"), torch.int32),
    **dict.fromkeys(("attention_mask", "response_mask"), torch.bool),
}
_ROWS_PER_COMPARISON = 64  # keeps the temporaries in the processor's cache
_BY_LAYER = "routed_experts"  # [B, L, M, K], stored as [B, M, L, K]: a pipeline stage fetches its own layers only


def controller_batch(output: DataProto) -> DataProto:
    """The columns of a rollout's output that the controller needs: int32 responses and their mask, 5 bytes a token."""
    small = {"responses": output.batch["responses"].int(), "response_mask": output.batch["response_mask"].bool()}
    return DataProto.from_dict(small, output.non_tensor_batch, output.meta_info)


def worker_batch(batch: DataProto, *columns: str) -> DataProto:
    """The batch that a training call is sent: references and ``columns`` [B, R], or all of a batch without references.

    A column with one value for all response tokens of a row, such as the advantages of outcome rewards, is sent as [B].
    """
    if batch.row_refs is None:
        return batch
    is_response_BR = batch.batch["response_mask"].bool() if columns else None
    tensors = {}
    for name in columns:
        assert is_response_BR is not None
        values_B = _row_values(batch.batch[name], is_response_BR)
        tensors[name] = batch.batch[name] if values_B is None else values_B
    return DataProto.from_dict(tensors, meta_info=batch.meta_info, row_refs=batch.row_refs)


class RowStore:
    """The rows that this rank owns, and its access to those of the other ranks; the constructor is collective.

    Args:
        group: all ranks.
        timeout_s: an owner that sends nothing for so long is an error.
        first_rank: the first of the ranks that generate.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, *, first_rank: int = 0) -> None:
        self._rank, self._first_rank = group.rank(), first_rank
        self._timeout_s = timeout_s
        self._batch = 0
        self._columns: dict[tuple[int, str], np.ndarray] = {}
        self.open_server(group)

    def open_server(self, group: dist.ProcessGroup) -> None:
        """Start this rank's server and exchange addresses."""
        self._server = RowServer(_own_host(), self._rows_of, self._timeout_s)
        self._addresses = [self._server.address] * group.size()
        dist.all_gather_object(self._addresses, self._server.address, group=group)
        neighbour = (self._rank + 1) % group.size()
        # A blocked network shows here, not later.
        fetch_rows({neighbour: (self._addresses[neighbour], [])}, self._timeout_s)

    def store_generated(self, output: DataProto, replica_size: int, *, keeps_earlier: bool = False) -> DataProto:
        """Starts a batch with this rank's share of its replica's ``output``; returns the batch for the controller.

        All ``replica_size`` ranks of a rollout replica have the same output and own its rows in turn. With
        ``keeps_earlier`` the rows of earlier batches stay: a step may train on those of several generations.
        """
        if not keeps_earlier:
            self.drop()
        self._batch += 1
        index = (self._rank - self._first_rank) % replica_size
        names = [name for name in GENERATED_COLUMNS if name in output.batch]
        for name in names:
            self._columns[self._batch, name] = _stored_form(name, output.batch[name][index::replica_size])
        rows = np.arange(len(output))
        places = self._places(self._rank - index + rows % replica_size, rows // replica_size)
        batch = controller_batch(output)
        batch.row_refs = RowRefs(dict.fromkeys(names, places))
        return batch

    def store(self, name: str, values: Tensor) -> DataProto:
        """Owns a new column of the rows of this step, whichever generation they are of; returns its references."""
        self._columns[self._batch, name] = _stored_form(name, values)
        rows = np.arange(len(values))
        return DataProto(row_refs=RowRefs({name: self._places(np.full_like(rows, self._rank), rows)}))

    def fetch(
        self, request: DataProto, columns: Sequence[str], layers: tuple[Sequence[int], int] | None = None
    ) -> DataProto:
        """``request`` with those of ``columns`` that are remote in place of its references, on the host.

        Args:
            columns: what this rank needs of the rows; response_mask is needed where a column came as one value a row.
            layers: the MoE layers of R3 to fetch, and the number of MoE layers that the rollout must have; the column
                is then [B, L, m, K].

        Raises:
            RowsUnavailableError: an owner is gone, or has generated another batch since.
        """
        if not len(request):
            raise ValueError("a request without rows: what it would fetch has no shape")
        sent = {} if request.batch is None else dict(request.batch.items())
        fetched: dict[str, Tensor] = {}
        if request.row_refs is not None:
            places = {name: request.row_refs.columns[name] for name in columns if name in request.row_refs}
            fetched = {name: self._used_form(name, rows) for name, rows in self._gather(places, layers).items()}
            for name in [name for name, values in sent.items() if values.dim() == 1]:
                sent[name] = sent[name][:, None] * fetched["response_mask"]
        return DataProto.from_dict(fetched | sent, request.non_tensor_batch, request.meta_info)

    def drop(self, before: int | None = None) -> None:
        """Frees the rows, or those of generated batches with a number below ``before``.

        Only when no call that may fetch them is under way on any rank.
        """
        self._columns = {key: rows for key, rows in self._columns.items() if before is not None and key[0] >= before}

    def close(self) -> None:
        self._server.close()

    def _gather(
        self, columns: dict[str, np.ndarray], layers: tuple[Sequence[int], int] | None
    ) -> dict[str, np.ndarray]:
        """Rows of each column in the order of its references [B, 3], this rank's own without the network."""
        requests: dict[int, list[RowsRequest]] = {}
        destinations: dict[int, list[tuple[str, np.ndarray]]] = {}
        for name, places in columns.items():
            chosen, num_layers = layers if layers is not None and name == _BY_LAYER else (None, 0)
            for number, rank in np.unique(places[:, [BATCH, RANK]], axis=0).tolist():
                (rows,) = np.nonzero((places[:, BATCH] == number) & (places[:, RANK] == rank))
                slots = tuple(places[rows, SLOT].tolist())
                requests.setdefault(rank, []).append(
                    RowsRequest(number, name, slots, None if chosen is None else tuple(chosen), num_layers)
                )
                destinations.setdefault(rank, []).append((name, rows))
        own = [self._rows_of(request) for request in requests.get(self._rank, [])]
        # Each rank starts with its neighbour, so that the requests spread over the owners.
        others = sorted(requests.keys() - {self._rank}, key=lambda rank: (rank - self._rank) % len(self._addresses))
        answers = fetch_rows({rank: (self._addresses[rank], requests[rank]) for rank in others}, self._timeout_s)
        gathered: dict[str, np.ndarray] = {}
        for rank, arrays in (answers | {self._rank: own}).items():
            for (name, rows), array in zip(destinations.get(rank, []), arrays, strict=True):
                if name not in gathered:
                    gathered[name] = np.empty((len(columns[name]), *array.shape[1:]), array.dtype)
                gathered[name][rows] = array
        return gathered

    def _rows_of(self, request: RowsRequest) -> np.ndarray:
        """Return rows; ValueError when they are not here. Runs in the server's thread too, beside ``store``."""
        column = self._columns.get((request.batch, request.column))
        if column is None:
            held = list(self._columns)  # one step, because the other thread may add to it
            names = ", ".join(name for batch, name in held if batch == self._batch)
            state = f"batch {self._batch}, of which {names or 'nothing'} is stored"
            raise ValueError(
                f"{request.column} of generated batch {request.batch} was requested, but the last one is {state}; rows "
                "are stored until the next generate_sequences: train on them before that"
            )
        if request.slots and not 0 <= min(request.slots) <= max(request.slots) < len(column):
            raise ValueError(f"rows {request.slots} of {len(column)} were requested")
        if request.layers is None:
            return column[list(request.slots)]
        if column.shape[1] != request.num_layers:
            raise ValueError(
                f"router replay R3: the rollout has {column.shape[1]} MoE layers, not {request.num_layers}"
            )
        return column[np.ix_(request.slots, request.layers)]

    def _places(self, owners_B: np.ndarray, slots_B: np.ndarray) -> np.ndarray:
        return np.stack([np.full_like(owners_B, self._batch), owners_B, slots_B], axis=1).astype(np.int32)

    def _used_form(self, name: str, rows: np.ndarray) -> Tensor:
        values = torch.from_numpy(rows)
        if name == _BY_LAYER:
            return values.movedim(1, 2)
        return values.to(torch.int64) if name in STORED_DTYPES else values


def _row_values(values_BR: Tensor, is_response_BR: Tensor) -> Tensor | None:
    """Return the value of each row [B] when all of its response tokens have the same one, else None."""
    values, is_response = values_BR.numpy(), is_response_BR.numpy()
    row_values = np.take_along_axis(values, is_response.argmax(-1)[:, None], axis=1)
    for first in range(0, len(values), _ROWS_PER_COMPARISON):
        rows = slice(first, first + _ROWS_PER_COMPARISON)
        if not ((values[rows] == row_values[rows]) | ~is_response[rows]).all():
            return None
    return torch.from_numpy(row_values[:, 0])


def _stored_form(name: str, values: Tensor) -> np.ndarray:
    """Return a copy in host memory, in the form in which it is sent."""
    if name == _BY_LAYER:
        values = values.movedim(2, 1)
    dtype = STORED_DTYPES.get(name, values.dtype)
    return values.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format).numpy()


def _own_host() -> str:
    """Return this host's address on the network of MASTER_ADDR; loopback when all ranks are on one host."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing, only reads the routing table
        return str(probe.getsockname()[0])
