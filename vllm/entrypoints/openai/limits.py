"""Limits on a request: the size of its body, and the time to send its head, to send its body and to read a response."""

from __future__ import annotations

import asyncio
import secrets
import time

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm.entrypoints.openai.errors import ApiError, respond
from vllm.entrypoints.openai.metrics import ServerMetrics

# A client that is still writing its body does not read the response, and closing the connection may lose the response.
# So an oversized body is read to its end and discarded, within these bounds.
DRAIN_TIMES_LIMIT = 16
DRAIN_S = 5.0


class RequestLimits:
    """ASGI middleware. Reads the whole body before the app sees the request.

    401 without the key (paths under /v1), 413 for a body beyond `max_body_bytes`, 408 for one that takes longer than
    `timeout_s`.
    """

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, timeout_s: float, api_key: str | None, metrics: ServerMetrics
    ) -> None:
        self.app, self.max_body_bytes, self.timeout_s = app, max_body_bytes, timeout_s
        self.api_key, self.metrics = api_key, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._counted(scope, send)
        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except ApiError as error:
            await respond(error, scope)(scope, receive, send)
            return
        if body is None:
            return  # the client left
        await self.app(scope, _replay(body, receive), send)

    def _check_key(self, scope: Scope) -> None:
        if self.api_key is None or not scope["path"].startswith("/v1"):
            return
        given = _header(scope, b"authorization")
        if not secrets.compare_digest(given, b"Bearer " + self.api_key.encode()):
            raise ApiError(401, "the Authorization header does not hold the server's API key", code="invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = _header(scope, b"content-length")
        is_too_large = declared.isdigit() and int(declared) > self.max_body_bytes
        deadline = time.monotonic() + self.timeout_s
        parts: list[bytes] = []
        size = 0
        has_more = True
        while has_more and not (is_too_large or size > self.max_body_bytes):
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {self.timeout_s:g} s ({size} bytes did)") from None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            has_more = message.get("more_body", False)
        if is_too_large or size > self.max_body_bytes:
            if has_more:
                await self._drain(receive)
            raise ApiError(413, f"the body is larger than the limit of {self.max_body_bytes} bytes")
        return b"".join(parts)

    async def _drain(self, receive: Receive) -> None:
        left = DRAIN_TIMES_LIMIT * self.max_body_bytes
        try:
            async with asyncio.timeout(DRAIN_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            pass

    def _counted(self, scope: Scope, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")  # our routes only: a client must not be able to create labels
                self.metrics.http[path, message["status"]] += 1
            await send(message)

        return counted


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body`, then what comes after it: the disconnect."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _header(scope: Scope, name: bytes) -> bytes:
    value: bytes = next((value for key, value in scope["headers"] if key == name), b"")
    return value


def http_protocol(timeout_s: float) -> type[H11Protocol]:
    """The protocol class of all connections of a server.

    uvicorn bounds the idle time between two requests of a connection, and the app bounds the time of a body. This class
    adds two limits: a connection that sends no complete head is closed after `timeout_s`, with a 408 if a head had
    started; a connection whose client reads no byte of a response for that long is closed, which the app sees as a
    disconnect.
    """

    class TimedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # any byte that the kernel does not take pauses writing
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_watching()
            self._stop_stall_timer()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall_timer = self.loop.call_later(timeout_s, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_stall_timer()
            super().resume_writing()

        def _watch_head(self) -> None:
            """Keep the timer running from the moment a head is due until it is complete."""
            is_due = self.conn.their_state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
            if not is_due:
                self._stop_watching()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(timeout_s, self._close_late)

        def _stop_watching(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _stop_stall_timer(self) -> None:
            if self._stall_timer is not None:
                self._stall_timer.cancel()
                self._stall_timer = None

        def _close_late(self) -> None:
            if not self.transport.is_closing():
                if self.conn.trailing_data[0]:
                    text = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                    self.transport.write(text)
                self.transport.close()

    return TimedProtocol
