"""One event loop for every ``async def`` reward function that this process calls, from whatever thread.

Locks, queues and clients of a function's module belong to the loop that first waited for them, so a loop per call would
break them from the second call on. The loop has a thread of its own, because managers call functions from several.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from typing import Any


def finished(result: Any) -> Any:
    """``result`` of a reward function; one that is awaitable is waited for."""
    if not inspect.isawaitable(result):
        return result
    return asyncio.run_coroutine_threadsafe(awaited(result), shared_loop()).result()


async def awaited(result: Any) -> Any:
    return await result


@functools.cache
def shared_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, which runs."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop
