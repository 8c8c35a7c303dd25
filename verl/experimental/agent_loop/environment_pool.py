"""Environments in processes that can be killed: a call that hangs or crashes ends its own sample and no other."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from verl.experimental.agent_loop.environment import EnvironmentSpec, Outcome
from verl.experimental.agent_loop.environment_worker import LINE_BYTES, MARK_BYTES
from verl.utils.child_process import child_environment

logger = logging.getLogger(__name__)

_START_LIMIT_S = 180.0
_GRACE_S = 5.0  # beyond a call's limit, for a process that is busy with others
_CLOSE_LIMIT_S = 10.0
_MAX_LOSSES = 3  # of processes that no call explains, before a sample is given up


class EnvironmentFailed(Exception):
    """A call raised, gave no valid answer, took too long or ended its process; its sample is over."""

    def __init__(self, reason: str, is_timeout: bool = False) -> None:
        super().__init__(reason)
        self.is_timeout = is_timeout


class _ProcessLost(Exception):
    """A process ended or was killed. ``culprit``: the call that ran then, 0 where none did."""

    def __init__(self, reason: str, culprit: int, is_timeout: bool) -> None:
        super().__init__(reason)
        self.culprit, self.is_timeout = culprit, is_timeout


class EnvironmentPool:
    """Environments of one class, on the event loop that runs.

    Async ones share a process. Those whose calls block share at most ``num_processes``, each of which makes one call at
    a time. One that is not deterministic has a process of its own, and waits until there is one.

    Args:
        timeout_s: seconds that one call may take.
    """

    def __init__(self, spec: EnvironmentSpec, num_processes: int, timeout_s: float) -> None:
        self.spec, self.num_processes, self.timeout_s = spec, num_processes, timeout_s
        self._processes: list[_Process] = []
        self._names = itertools.count()
        self._freed = asyncio.Condition()
        self._kind: dict[str, bool] = {}

    async def start(self) -> None:
        """Load the class; RuntimeError when it cannot be."""
        await self._new_process()
        self._kind = self._processes[0].kind

    @property
    def takes_token_ids(self) -> bool:
        return self._kind["takes_token_ids"]

    @property
    def writes_rows(self) -> bool:
        return self._kind["writes_rows"]

    @property
    def is_deterministic(self) -> bool:
        return self._kind["is_deterministic"]

    def environment(self, row: Mapping[str, Any], seed: int) -> PooledEnvironment:
        return PooledEnvironment(self, str(next(self._names)), row, seed)

    async def close(self) -> None:
        for process in self._processes:
            await process.lose("the run has ended")
        self._processes = []

    async def process_for(self, environment: PooledEnvironment) -> _Process:
        """A process that has room for another environment."""
        async with self._freed:
            while True:
                self._processes = [process for process in self._processes if process.lost is None]
                least = min(self._processes, key=lambda process: len(process.members), default=None)
                has_room = least is not None and (not least.members or self._shares_one)
                if not has_room and len(self._processes) < self._most_processes:
                    try:
                        least = await self._new_process()
                    except RuntimeError as error:
                        raise EnvironmentFailed(str(error)) from error
                if least is not None and (self.is_deterministic or not least.members):
                    least.members.add(environment)
                    return least
                await self._freed.wait()

    async def leave(self, environment: PooledEnvironment, process: _Process) -> None:
        async with self._freed:
            process.members.discard(environment)
            self._freed.notify_all()

    @property
    def _most_processes(self) -> int:
        return 1 if self._shares_one else self.num_processes

    @property
    def _shares_one(self) -> bool:
        return self._kind["is_async"] and self.is_deterministic

    async def _new_process(self) -> _Process:
        process = _Process(self.spec)
        await process.start()
        self._processes.append(process)
        return process


class PooledEnvironment:
    """One sample's environment, rebuilt from its actions where its process is lost through no fault of its own."""

    def __init__(self, pool: EnvironmentPool, name: str, row: Mapping[str, Any], seed: int) -> None:
        self._pool, self._name, self._row, self._seed = pool, name, row, seed
        self._actions: list[Any] = []
        self._process: _Process | None = None

    async def reset(self) -> Outcome:
        return await self._call(None)

    async def step(self, action: Any) -> Outcome:
        self._actions.append(action)
        return await self._call(action)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.lost is None:
                await process.ask(_CLOSE_LIMIT_S, do="close", environment=self._name)
        except _ProcessLost as lost:
            logger.warning("an environment could not be closed: %s", lost)
        finally:
            await self._pool.leave(self, process)

    async def _call(self, action: Any) -> Outcome:
        for _ in range(_MAX_LOSSES):
            try:
                is_new = self._process is None or self._process.lost is not None
                if is_new and self._process is not None and not self._pool.is_deterministic:
                    raise EnvironmentFailed(f"its process is lost, and it is not deterministic: {self._process.lost}")
                if is_new:
                    self._process = await self._pool.process_for(self)
                    for earlier in (None, *self._actions)[: len(self._actions)]:
                        await self._ask(earlier)
                return await self._ask(action)
            except _ProcessLost as lost:
                reason = str(lost)
        raise EnvironmentFailed(f"its process was lost {_MAX_LOSSES} times: {reason}")

    async def _ask(self, action: Any) -> Outcome:
        assert self._process is not None
        given = {"do": "step", "action": action}
        if action is None:
            given = {"do": "reset", "row": self._row, "seed": self._seed}
        reply = await self._process.ask(self._pool.timeout_s, environment=self._name, **given)
        if "error" in reply:
            raise EnvironmentFailed(reply["error"], reply.get("is_timeout", False))
        return Outcome(**reply)


class _Process:
    """A process of ``environment_worker`` and the line protocol to it."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self.members: set[PooledEnvironment] = set()
        self.kind: dict[str, bool] = {}
        self.lost: _ProcessLost | None = None
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._turn = asyncio.Lock()  # of calls that block
        self._printed: deque[bytes] = deque(maxlen=20)
        self._heard_s = 0.0

    async def start(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(MARK_BYTES)
            self._mark = mmap.mmap(file.fileno(), MARK_BYTES)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "verl.experimental.agent_loop.environment_worker"),
                *(json.dumps(asdict(self._spec)), str(os.getpid()), str(file.fileno())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                pass_fds=[file.fileno()],
                start_new_session=True,
                env=child_environment(),
            )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._tasks = [asyncio.create_task(self._keep_printed(self._process.stderr))]
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _START_LIMIT_S)
        except TimeoutError:
            line = b""
        if not line:
            await self.lose("it did not start")
            where = f"{self._spec.name} of {self._spec.path}"
            raise RuntimeError(f"the environment cannot be loaded: {where}\n{self._tail()}")
        self.kind = json.loads(line)["ready"]
        self._tasks.append(asyncio.create_task(self._read(self._process.stdout)))

    async def ask(self, limit_s: float, **request: Any) -> dict[str, Any]:
        """The reply to one call; _ProcessLost, or EnvironmentFailed where this call is the reason for that."""
        if self.kind["is_async"]:
            return await self._ask(limit_s, request)
        async with self._turn:
            return await self._ask(limit_s, request)

    async def _ask(self, limit_s: float, request: dict[str, Any]) -> dict[str, Any]:
        if self.lost is not None:
            raise self.lost
        if not self._pending:
            self._heard_s = time.monotonic()
        call, future = next(self._calls), asyncio.get_running_loop().create_future()
        self._pending[call] = future
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"call": call, "limit_s": limit_s, **request}).encode() + b"\n")
            wait_s = limit_s if not self.kind["is_async"] else limit_s + _GRACE_S
            while not (await asyncio.wait([future], timeout=wait_s))[0]:
                # It is busy with others while it answers them.
                if not self.kind["is_async"] or time.monotonic() - self._heard_s >= _GRACE_S:
                    await self.lose(f"a call took more than {limit_s:g} s", is_timeout=True)
                wait_s = _GRACE_S
            return await future
        except _ProcessLost as lost:
            if lost.culprit == call:
                raise EnvironmentFailed(str(lost), lost.is_timeout) from lost
            raise
        finally:
            self._pending.pop(call, None)

    async def _read(self, replies: asyncio.StreamReader) -> None:
        while line := await replies.readline():
            self._heard_s = time.monotonic()
            reply = json.loads(line)
            future = self._pending.get(reply.pop("call"))
            if future is not None and not future.done():
                future.set_result(reply)
        status = await self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        await self.lose(f"a call ended its process: {how}")

    async def lose(self, reason: str, *, is_timeout: bool = False) -> None:
        """End it, and every call that is under way."""
        if self.lost is not None:
            return
        self.lost = _ProcessLost(reason, int.from_bytes(self._mark[:], "little"), is_timeout)
        with suppress(ProcessLookupError):  # it leads a group, in which what it started may still run
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self.lost)

    async def _keep_printed(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(1 << 16):
            self._printed.append(part[-4096:])

    def _tail(self) -> str:
        return b"".join(self._printed).decode(errors="replace")[-2000:]
