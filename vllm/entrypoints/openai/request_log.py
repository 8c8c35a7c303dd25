"""A line of the log for each request, at its end."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.entrypoints.openai.protocol import RequestBody
from vllm.entrypoints.openai.request_fields import FIELDS, MAX_NAME, reason_of

logger = logging.getLogger(__name__)

PROBES = ("/health", "/metrics")  # asked every few seconds: their lines are for debugging
MAX_UNKNOWN = 8  # unknown fields that a request's line has; a body may have a million
MAX_EXPLAINED = 256  # of all requests
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
    scope.setdefault(_NOTES, []).append(_printable(text))


class FieldLog:
    """Names the fields without effect in the line of their request; says once for each of them why."""

    def __init__(self) -> None:
        self._explained: set[str] = set()

    def add(self, body: RequestBody, scope: Scope) -> None:
        given = body.without_effect()
        if not given:
            return
        unknown = [name for name in given if name not in FIELDS]
        names = [name for name in given if name in FIELDS]
        names += [_printable(name[:MAX_NAME]) for name in unknown[:MAX_UNKNOWN]]
        more = f" and {len(unknown) - MAX_UNKNOWN} more" if len(unknown) > MAX_UNKNOWN else ""
        note(scope, f"without effect: {', '.join(names)}{more}")
        for name in names:
            if name not in self._explained and len(self._explained) < MAX_EXPLAINED:
                self._explained.add(name)
                reason = reason_of(name, type(body).model_fields)
                logger.info("%s in a request is taken without effect: %s", name, reason)


def _printable(text: str) -> str:
    shown = "".join(char if char.isprintable() else " " for char in text[:500])
    return " ".join(shown.split())
