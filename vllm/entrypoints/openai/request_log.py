"""A line of the log for each request, at its end."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PROBES = ("/health", "/metrics")  # asked every few seconds: their lines are for debugging
_NOTES = "vllm.notes"


class RequestLog:
    """ASGI middleware, outermost: writes who asked for what, the status, the seconds and the handlers' notes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 499  # as nginx calls a client that leaves

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            client = scope.get("client") or ("unknown", 0)
            path = quote(scope["path"][:200])  # a client must not be able to write lines
            level = logging.DEBUG if path in PROBES and status < 400 else logging.INFO
            notes = "".join(f": {note}" for note in scope.get(_NOTES, ()))
            seconds = time.monotonic() - started
            logger.log(
                level, "%s:%s %s %s %s in %.2f s%s", client[0], client[1], scope["method"], path, status, seconds, notes
            )


def note(scope: Scope, text: str) -> None:
    """Add to the line of this request; of a text that a client may have written, what can be printed."""
    shown = "".join(char if char.isprintable() else " " for char in text[:500])
    scope.setdefault(_NOTES, []).append(" ".join(shown.split()))
