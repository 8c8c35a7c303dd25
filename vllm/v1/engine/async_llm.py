"""AsyncLLM: an engine stepped by a thread of its own, its outputs awaited on an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from vllm.entrypoints.llm import LLM
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.non_finite import NonFiniteLogitsError

logger = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """The engine has as many unfinished samples as it takes."""


class EngineDeadError(RuntimeError):
    """The engine's thread has ended, and no request can run."""


class RequestCutError(RuntimeError):
    """The engine was paused before the request was done."""


class RequestOutputCollector:
    """One caller's requests "`name`-0", "-1" ... and their pending outputs. It is used on the event loop only.

    Iterating gives lists of outputs, all since the last one, until every request is finished; it raises what ended one
    of them early.
    """

    def __init__(self, name: str, prompts: Sequence[PromptType], params: SamplingParams, priority: int) -> None:
        self.name, self.prompts, self.params, self.priority = name, prompts, params, priority
        self.request_ids = tuple(f"{name}-{index}" for index in range(len(prompts)))
        self.created_s = time.monotonic()
        self.is_admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_left = len(prompts)
        self._arrived: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        if not self._num_left:
            raise StopAsyncIteration
        outputs: list[RequestOutput] = []
        while not (outputs and self._arrived.empty()):
            arrived = await self._arrived.get()
            if isinstance(arrived, Exception):
                self._arrived.put_nowait(arrived)  # for the next time
                if outputs:
                    break
                raise arrived
            outputs.append(arrived)
            self._num_left -= arrived.finished
        return outputs

    def admit(self) -> None:
        if not self.is_admitted.done():
            self.is_admitted.set_result(None)

    def put(self, output: RequestOutput) -> None:
        self._arrived.put_nowait(output)

    def fail(self, error: Exception) -> None:
        if not self.is_admitted.done():
            self.is_admitted.set_exception(error)
        self._arrived.put_nowait(error)


@dataclass
class _Inbox:
    """The requests of the event loop and of a pausing caller to the thread; guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    to_add: list[RequestOutputCollector] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    is_pausing: bool = False
    is_cutting: bool = False  # a pause waits no longer
    is_paused: bool = False  # set by the thread: it leaves the engine alone
    is_closing: bool = False


class AsyncLLM:
    """Requests of an event loop, run by `llm` in a background thread.

    From `start` to `shutdown` nothing else may use the engine, except within `paused`. At most `max_queue_size` samples
    are unfinished at any time. `on_death` is called on the event loop when a step fails, which ends all requests.
    """

    def __init__(self, llm: LLM, max_queue_size: int, on_death: Callable[[], None] | None = None) -> None:
        self.llm, self.max_queue_size, self._on_death = llm, max_queue_size, on_death
        self.num_aborted = 0  # requests that nobody waited for to their end
        self._inbox = _Inbox()
        self._collectors: dict[str, RequestOutputCollector] = {}  # of unfinished requests; touched on the loop only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread lives: it takes requests, or waits for a pause to end."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def num_unfinished_samples(self) -> int:
        return sum(collector.params.n for collector in self._collectors.values())

    def start(self) -> None:
        """Start the thread; called on the event loop that will await the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def shutdown(self, timeout_s: float = 30.0) -> None:
        """End the thread after its step; who still waits gets EngineDeadError."""
        with self._inbox.changed:
            self._inbox.is_closing = True
            self._inbox.changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)
        if self.is_running:
            logger.error("the engine's step has not ended %g s after the shutdown", timeout_s)

    async def add_requests(
        self, request_id: str, prompts: Sequence[PromptType], params: SamplingParams, priority: int = 0
    ) -> RequestOutputCollector:
        """Hand the requests "`request_id`-0", "-1" ... to the engine, all or none.

        The caller must call `abort` at the end, which does nothing to finished requests. ValueError for a prompt that
        cannot be run, QueueFullError, RuntimeError while the engine sleeps or is dead.
        """
        if not self.is_running:
            raise EngineDeadError("the engine does not run")
        wanted = len(prompts) * params.n
        if self.num_unfinished_samples + wanted > self.max_queue_size:
            raise QueueFullError(
                f"{self.num_unfinished_samples} samples are unfinished and {wanted} more would exceed the limit of "
                f"{self.max_queue_size}; try again later"
            )
        collector = RequestOutputCollector(request_id, prompts, params, priority)
        self._collectors |= dict.fromkeys(collector.request_ids, collector)
        with self._inbox.changed:
            self._inbox.to_add.append(collector)
            self._inbox.changed.notify_all()
        try:
            await collector.is_admitted
        except BaseException:
            self.abort(collector)
            raise
        return collector

    def abort(self, collector: RequestOutputCollector) -> None:
        unfinished = [name for name in collector.request_ids if self._collectors.pop(name, None) is not None]
        self.num_aborted += len(unfinished)
        if unfinished:
            with self._inbox.changed:
                self._inbox.to_add = [one for one in self._inbox.to_add if one is not collector]
                self._inbox.to_abort += unfinished
                self._inbox.changed.notify_all()

    @contextmanager
    def paused(self, drain_s: float = 30.0) -> Iterator[None]:
        """Give the caller exclusive use of the engine: another thread may generate, sleep, wake up and load weights.

        Waits until the running requests are done; those that are not after `drain_s` end with RequestCutError. New ones
        wait until the end of the block.
        """
        inbox = self._inbox
        with inbox.changed:
            assert not inbox.is_pausing, "two callers pause one engine"
            inbox.is_pausing = True
            inbox.changed.notify_all()
            if not inbox.changed.wait_for(self._is_mine, drain_s):
                inbox.is_cutting = True
                inbox.changed.notify_all()
                inbox.changed.wait_for(self._is_mine)
        try:
            yield
        finally:
            with inbox.changed:
                inbox.is_pausing = inbox.is_cutting = inbox.is_paused = False
                inbox.changed.notify_all()

    def _is_mine(self) -> bool:
        return self._inbox.is_paused or self._inbox.is_closing or not self.is_running

    def _run(self) -> None:
        """The thread's loop: add requests, step, deliver outputs, until the shutdown or a failed step."""
        engine, running = self.llm.engine, set[str]()
        error: Exception = EngineDeadError("the server is shutting down")
        try:
            while not self._inbox.is_closing:
                self._take_in(running)
                if running:
                    outputs = self._without_failed(engine.step(ends_failed_requests=True), running)
                    running.difference_update(output.request_id for output in outputs if output.finished)
                    self._on_loop(self._hand_out, outputs)
            engine.abort_request(list(running))
        except Exception as failure:
            logger.exception("the engine's step failed: no request survives it")
            error = EngineDeadError(f"the engine failed: {type(failure).__name__}: {failure}")
            if self._on_death is not None:
                self._on_loop(self._on_death)
        finally:
            with self._inbox.changed:
                self._inbox.is_closing = True
                self._inbox.changed.notify_all()
            self._on_loop(lambda: self._fail(list(self._collectors), error))

    def _without_failed(self, outputs: Iterable[RequestOutput], running: set[str]) -> list[RequestOutput]:
        """End the requests that have a failed sample, with its error; return the outputs of the others."""
        kept = []
        for output in outputs:
            problem = next((str(one.stop_reason) for one in output.outputs if one.finish_reason == "error"), None)
            if problem is None:
                kept.append(output)
                continue
            self.llm.engine.abort_request([output.request_id])
            running.discard(output.request_id)
            is_broken = self.llm.core.model_problem is not None
            error = NonFiniteLogitsError(problem) if is_broken else ValueError(problem)
            self._on_loop(self._fail, [output.request_id], error)
        return kept

    def _take_in(self, running: set[str]) -> None:
        """Add and abort the requests that the event loop asks for.

        Waits while there is nothing to run: for a request, an abort, a pause or its end, the shutdown.
        """
        engine, inbox = self.llm.engine, self._inbox
        with inbox.changed:
            while not (running or inbox.is_closing or (inbox.to_add and not inbox.is_pausing)):
                if inbox.is_pausing and not inbox.is_paused:
                    inbox.is_paused = True
                    inbox.changed.notify_all()
                inbox.changed.wait()
            to_abort, inbox.to_abort = running.intersection(inbox.to_abort), []
            new: list[RequestOutputCollector] = []
            if inbox.is_cutting:
                to_abort = set(running)
                self._on_loop(self._fail, to_abort, RequestCutError("the engine was taken for something else"))
            elif not inbox.is_pausing:
                new, inbox.to_add = inbox.to_add, []
        if to_abort:
            engine.abort_request(list(to_abort))
            running -= to_abort
        for collector in new:
            names = collector.request_ids
            try:
                for name, prompt in zip(names, collector.prompts, strict=True):
                    engine.add_request(name, prompt, collector.params, priority=collector.priority)
            except Exception as error:  # these requests' alone, whatever it is: the others go on
                engine.abort_request(names)
                self._on_loop(self._fail, names, error)
            else:
                running.update(names)
                self._on_loop(collector.admit)

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:  # else aborted meanwhile
                collector.put(output)
                if output.finished:
                    del self._collectors[output.request_id]

    def _fail(self, request_ids: Iterable[str], error: Exception) -> None:
        for request_id in request_ids:
            collector = self._collectors.pop(request_id, None)
            if collector is not None:
                collector.fail(error)
