"""A server in each process from which other processes fetch rows of arrays; a thread answers at any time.

Each fetch is one connection. The client sends a frame (4 bytes of length, JSON) with a token and its requests. The
server answers with a frame of types and shapes, or with an error, followed by the bytes of the arrays. Nothing is
unpickled.

torch's ``TCPStore`` is not used: it looks up the name of every peer that connects, which took 5 s each where the
resolver did not answer, and it limits a value to 8 MiB.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 64 << 20
_MAX_CONNECTIONS = 128  # of one fetch at a time; more owners take turns
_BACKLOG = 4096


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
    """Listens on a free port of ``host`` until ``close``.

    Args:
        rows_of: called in the server's thread; the message of its ValueError is sent to the client.
    """

    def __init__(self, host: str, rows_of: Callable[[RowsRequest], np.ndarray]) -> None:
        self._rows_of = rows_of
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="row-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; clients that wait for an answer see a closed connection."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        accepting = self._loop.create_task(self._accept())  # the loop holds only weak references to tasks
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop) | {accepting}
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        """Accept connections; a task answers each, so that no client waits for another one's network."""
        answers: set[asyncio.Task[None]] = set()
        while True:
            connection, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._answer(connection))
            answers.add(task)
            task.add_done_callback(answers.discard)

    async def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = json.loads(await _receive_frame(self._loop, connection))
                if not hmac.compare_digest(str(request["token"]), self.address.token):
                    raise ValueError("wrong token")
                requests = [RowsRequest(**fields) for fields in request["requests"]]
            except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
                logger.warning("a connection to the row server was not understood: %r", error)
                return
            try:
                header, arrays = _answer_to(requests, self._rows_of)
                await self._loop.sock_sendall(connection, _frame(header))
                for array in arrays:
                    await self._loop.sock_sendall(connection, _as_bytes(array))
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
    return asyncio.run(_fetch_from_all(requests, timeout_s))


async def _fetch_from_all(
    requests: Mapping[int, tuple[Address, Sequence[RowsRequest]]], timeout_s: float
) -> dict[int, list[np.ndarray]]:
    turns = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def fetch(rank: int, address: Address, requests: Sequence[RowsRequest]) -> list[np.ndarray]:
        async with turns:
            try:
                return await _fetch_from(address, requests, timeout_s)
            except TimeoutError as error:
                problem = f"nothing came for {timeout_s:g} s"
                raise RowsUnavailableError(f"rows of rank {rank} ({address}): {problem}") from error
            except (OSError, EOFError, ValueError) as error:
                raise RowsUnavailableError(f"rows of rank {rank} ({address}): {error or repr(error)}") from error

    answers = await asyncio.gather(*(fetch(rank, *request) for rank, request in requests.items()))
    return dict(zip(requests, answers, strict=True))


async def _fetch_from(address: Address, requests: Sequence[RowsRequest], timeout_s: float) -> list[np.ndarray]:
    loop = asyncio.get_running_loop()
    with socket.socket(_family(address.host), socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(timeout_s) as limit:

            def moved() -> None:
                limit.reschedule(loop.time() + timeout_s)

            await loop.sock_connect(connection, (address.host, address.port))
            request = {"token": address.token, "requests": [asdict(rows) for rows in requests]}
            await loop.sock_sendall(connection, _frame(request))
            header = json.loads(await _receive_frame(loop, connection))
            if "error" in header:
                raise ValueError(header["error"])
            arrays = [np.empty(shape, dtype) for dtype, shape in header["arrays"]]
            for array in arrays:
                await _receive_into(loop, connection, _as_bytes(array), moved)
            return arrays


def _answer_to(
    requests: Sequence[RowsRequest], rows_of: Callable[[RowsRequest], np.ndarray]
) -> tuple[dict[str, Any], list[np.ndarray]]:
    try:
        arrays = [np.ascontiguousarray(rows_of(request)) for request in requests]
    except ValueError as error:
        return {"error": str(error)}, []
    return {"arrays": [(array.dtype.str, array.shape) for array in arrays]}, arrays


def _frame(content: dict[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "big") + text


async def _receive_frame(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    length = bytearray(4)
    await _receive_into(loop, connection, memoryview(length))
    num_bytes = int.from_bytes(length, "big")
    if num_bytes > _MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes")
    frame = bytearray(num_bytes)
    await _receive_into(loop, connection, memoryview(frame))
    return bytes(frame)


async def _receive_into(
    loop: asyncio.AbstractEventLoop,
    connection: socket.socket,
    buffer: memoryview,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Fill ``buffer``; EOFError when the other side closes the connection first."""
    done = 0
    while done < len(buffer):
        received = await loop.sock_recv_into(connection, buffer[done:])
        if not received:
            raise EOFError("the connection was closed")
        done += received
        moved()


def _as_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
