"""uvicorn's HTTP connection with limits on the time to send a request's head and to read a response."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


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
