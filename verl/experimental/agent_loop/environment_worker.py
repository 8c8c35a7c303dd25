"""A process of environments: JSON lines in on stdin, JSON lines out; killed from outside when it hangs."""

from __future__ import annotations

import asyncio
import inspect
import json
import mmap
import resource
import signal
import sys
import time
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import asdict
from typing import Any, TextIO

from hf_formats.parent_death import end_with_parent
from verl.experimental.agent_loop.environment import EnvironmentSpec, beginning, is_async, load_environment, outcome
from verl.utils.child_process import claim_stdout, send

LINE_BYTES = 64 << 20  # of a request, which may hold a whole conversation
REPLY_CHARS = 4 << 20  # of an observation; a longer one ends its sample
MARK_BYTES = 8
# The number of its environment's call, of a task and of the tasks that it starts, which may go on in a later call.
_current_call: ContextVar[list[int]] = ContextVar("current_call", default=[0])  # noqa: B039 - never changed


def main() -> None:
    """Arguments: the environment as JSON {path, name, kwargs}; the parent's pid; a descriptor of MARK_BYTES.

    These bytes hold the number of the call whose code runs now, 0 between two: they tell which one hangs or crashed.
    """
    end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = claim_stdout()
    spec = EnvironmentSpec(**json.loads(sys.argv[1]))
    with mmap.mmap(int(sys.argv[3]), MARK_BYTES) as mark:
        asyncio.run(_Worker(load_environment(spec), spec.kwargs, replies, mark).serve())


class _Marked(Coroutine[Any, Any, Any]):
    """A task's coroutine that marks its call whenever it runs."""

    def __init__(self, inner: Any, mark: mmap.mmap) -> None:
        self._inner, self._mark, self._call = inner, mark, _current_call.get()

    def send(self, value: Any) -> Any:
        self._mark[:] = self._call[0].to_bytes(MARK_BYTES, "little")
        try:
            return self._inner.send(value)
        finally:
            self._mark[:] = bytes(MARK_BYTES)

    def throw(self, *error: Any) -> Any:
        self._mark[:] = self._call[0].to_bytes(MARK_BYTES, "little")
        try:
            return self._inner.throw(*error)
        finally:
            self._mark[:] = bytes(MARK_BYTES)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()


class _Worker:
    def __init__(self, environment: type, kwargs: dict[str, Any], replies: TextIO, mark: mmap.mmap) -> None:
        self._class, self._kwargs, self._replies, self._mark = environment, kwargs, replies, mark
        self._is_async = is_async(environment)
        self._environments: dict[str, Any] = {}
        self._calls: dict[str, list[int]] = {}

    async def serve(self) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LINE_BYTES)
        loop.set_task_factory(lambda loop, inner, **named: asyncio.Task(_Marked(inner, self._mark), loop=loop, **named))
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        flags = {name: bool(getattr(self._class, name, default)) for name, default in _FLAGS.items()}
        self._send({"ready": {"is_async": self._is_async, **flags}})
        under_way: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            request = json.loads(line)
            call = self._calls.setdefault(request["environment"], [0])
            call[0] = request["call"]
            before = _current_call.set(call)
            task = loop.create_task(self._answer(request))
            _current_call.reset(before)
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            if not self._is_async:
                await task

    async def _answer(self, request: dict[str, Any]) -> None:
        limit_s = request["limit_s"] if self._is_async else None  # else nothing would look at the clock
        start_s = time.monotonic()
        try:
            reply = await asyncio.wait_for(self._result(request), limit_s)
            reply["seconds"] = time.monotonic() - start_s
        except TimeoutError:
            reply = {"error": f"took more than {request['limit_s']:g} s", "is_timeout": True}
        except (Exception, SystemExit) as error:  # a process edge: what the user's code raises is this sample's
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        self._send({"call": request["call"], **reply})

    async def _result(self, request: dict[str, Any]) -> dict[str, Any]:
        name, do = request["environment"], request["do"]
        if do == "close":
            environment = self._environments.pop(name, None)
            del self._calls[name]
            if hasattr(environment, "close"):
                await _finished(environment.close())
            return {}
        if do == "reset":
            environment = self._environments[name] = self._class(**self._kwargs)
            given = await _finished(environment.reset(request["row"], request["seed"]))
            return asdict(beginning(given, getattr(environment, "tools", ())))
        return asdict(outcome(await _finished(self._environments[name].step(request["action"]))))

    def _send(self, reply: dict[str, Any]) -> None:
        length = len(json.dumps(reply))
        if length > REPLY_CHARS:
            reply = {"call": reply["call"], "error": f"its answer has {length:,} characters as JSON"}
        send(self._replies, reply)


_FLAGS = {"is_deterministic": True, "takes_token_ids": False, "writes_rows": False}


async def _finished(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


if __name__ == "__main__":
    main()
