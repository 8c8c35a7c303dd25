"""A server in each process from which other processes fetch rows of arrays; a thread answers at any time.

Each fetch is one connection. The client sends a frame (4 bytes of length, JSON) with a token and its requests. The
server answers with a frame of types and shapes, or with an error, followed by the bytes of the arrays. Nothing is
unpickled. A thread answers each client, so that none waits for another one's network.

torch's ``TCPStore`` is not used: it looks up the name of every peer that connects, which took 5 s each where the
resolver did not answer, and it limits a value to 8 MiB.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 64 << 20
_MAX_CONNECTIONS = 128  # of one fetch at a time; more owners take turns
_BACKLOG = 4096
_RETRY_S = 0.1  # without file descriptors or threads, which other answers give back when they end
_WARNING_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the secret that it expects."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RowsRequest:
    """A request for rows of one column of one owner.

    Attributes:
        batch: the number of the generated batch that the column belongs to.
        slots: the indices of the rows in the owner's column.
        layers: indices along the column's second dimension; None means all of it.
        num_layers: the expected size of that dimension when ``layers`` is given.
    """

    batch: int
    column: str
    slots: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    num_layers: int = 0


class RowServer:
    """Listens on a free port of ``host`` until ``close``. No client and no shortage ends it.

    Args:
        rows_of: called in threads of the server; the message of its ValueError is sent to the client.
        timeout_s: a client that neither sends nor takes anything for so long is given up.
    """

    def __init__(self, host: str, rows_of: Callable[[RowsRequest], np.ndarray], timeout_s: float) -> None:
        self._rows_of, self._timeout_s = rows_of, timeout_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="row-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuses clients from now on; those that have connected are still answered."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept, which a close alone does not
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        """Answers clients in threads of their own until ``close``; a connection that fails is one client's affair."""
        warned_at = -_WARNING_INTERVAL_S
        while not self._is_closing.is_set():
            connection = None
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), name="row-answer", daemon=True).start()
            except (OSError, RuntimeError) as error:  # a reset peer, no descriptor; no thread
                if connection is not None:
                    connection.close()
                if self._is_closing.is_set():
                    return
                if time.monotonic() - warned_at >= _WARNING_INTERVAL_S:
                    logger.warning("the row server %s could not take a client, and goes on: %r", self.address, error)
                    warned_at = time.monotonic()
                self._is_closing.wait(_RETRY_S)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(self._timeout_s)
            try:
                request = json.loads(_receive_frame(connection))
                if not hmac.compare_digest(str(request["token"]), self.address.token):
                    raise ValueError("wrong token")
                requests = [RowsRequest(**fields) for fields in request["requests"]]
            except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
                logger.warning("a connection to the row server was not understood: %r", error)
                return
            try:
                arrays = [np.ascontiguousarray(self._rows_of(request)) for request in requests]
                header: dict[str, Any] = {"arrays": [(array.dtype.str, array.shape) for array in arrays]}
            except ValueError as error:
                arrays, header = [], {"error": str(error)}
            try:
                connection.sendall(_frame(header))
                for array in arrays:
                    _send_all(connection, _as_bytes(array))
            except OSError as error:
                logger.warning("a client of the row server did not wait for its rows: %s", error)


class RowsUnavailableError(RuntimeError):
    """An owner did not answer, or does not have the requested rows."""


def fetch_rows(
    requests: Mapping[int, tuple[Address, Sequence[RowsRequest]]], timeout_s: float
) -> dict[int, list[np.ndarray]]:
    """Return the rows of each owner, one array per request. All owners are asked concurrently.

    Args:
        requests: rank of the owner -> its address and the requests to it.
        timeout_s: an owner that sends nothing for so long raises RowsUnavailableError.
    """
    pool = ThreadPoolExecutor(_MAX_CONNECTIONS, thread_name_prefix="row-fetch")
    try:
        answers = {rank: pool.submit(_fetch_from, rank, *request, timeout_s) for rank, request in requests.items()}
        return {rank: answer.result() for rank, answer in answers.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _fetch_from(rank: int, address: Address, requests: Sequence[RowsRequest], timeout_s: float) -> list[np.ndarray]:
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            connection.sendall(_frame({"token": address.token, "requests": [asdict(rows) for rows in requests]}))
            header = json.loads(_receive_frame(connection))
            if "error" in header:
                raise ValueError(header["error"])
            arrays = [np.empty(shape, dtype) for dtype, shape in header["arrays"]]
            for array in arrays:
                _receive_into(connection, _as_bytes(array))
            return arrays
    except TimeoutError as error:
        problem = f"nothing came for {timeout_s:g} s"
        raise RowsUnavailableError(f"rows of rank {rank} ({address}): {problem}") from error
    except (OSError, EOFError, ValueError) as error:
        raise RowsUnavailableError(f"rows of rank {rank} ({address}): {error or repr(error)}") from error


def _send_all(connection: socket.socket, buffer: memoryview) -> None:
    """Send ``buffer``; the socket's time limit holds for each part, while that of ``sendall`` is for the whole."""
    while buffer:
        buffer = buffer[connection.send(buffer) :]


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "big") + text


def _receive_frame(connection: socket.socket) -> bytes:
    length = bytearray(4)
    _receive_into(connection, memoryview(length))
    num_bytes = int.from_bytes(length, "big")
    if num_bytes > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    frame = bytearray(num_bytes)
    _receive_into(connection, memoryview(frame))
    return bytes(frame)


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill ``buffer``; EOFError when the other side closes the connection first."""
    while buffer:
        received = connection.recv_into(buffer)
        if not received:
            raise EOFError("the connection was closed")
        buffer = buffer[received:]


def _as_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
