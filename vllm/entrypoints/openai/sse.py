"""Server-sent events: a stream of JSON, the answer's last event [DONE] or an error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from vllm.entrypoints.openai.errors import ApiError

DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends what `events` yields; calls `on_end` at the end, after an error and after a disconnect alike."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(
            _closed_with_done(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json()}\n\n"


async def _closed_with_done(events: AsyncIterator[str]) -> AsyncIterator[str]:
    try:
        async for text in events:
            yield text
    except ApiError as error:  # the status has been sent: the error can only be an event
        yield f"data: {error.body()}\n\n"
    else:
        yield DONE
