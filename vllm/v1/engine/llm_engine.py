"""The requests of one process: all of them to their end, or some steps of those that come one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import SimpleNamespace
from typing import Protocol

from vllm.config import ModelConfig, VllmConfig
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.tokenizer import LazyTokenizer
from vllm.utils import frozen_gc_heap
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputStream, prompt_of
from vllm.v1.engine.processor import Processor
from vllm.v1.engine.rebalancer import Rebalancer
from vllm.v1.request import Request

_IDLE_S = 0.02  # between two looks for requests, while every one of them is waited for


class StepLimits:
    """Where a run is cut: after so many steps or seconds from now, whichever comes first; None: not at all."""

    def __init__(self, max_steps: int | None = None, max_seconds: float | None = None) -> None:
        for name, limit in (("max_steps", max_steps), ("max_seconds", max_seconds)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}={limit} must be positive, or None to run every sample to its end")
        self.has_steps, self.has_seconds = max_steps is not None, max_seconds is not None
        self._steps_left = math.inf if max_steps is None else max_steps
        self._end_s = math.inf if max_seconds is None else time.monotonic() + max_seconds

    def count_step(self) -> None:
        self._steps_left -= 1

    def are_reached(self) -> bool:
        return self._steps_left <= 0 or time.monotonic() >= self._end_s


class RequestSource(Protocol):
    """Where requests come from while others run, such as the next turns of those that have finished."""

    @property
    def is_waiting(self) -> bool:
        """Whether more requests will come, perhaps long after the last one has finished."""
        ...

    def take(self, finished: Sequence[Request]) -> list[Request]:
        """The requests that have come; ``finished`` are those of the last step."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until a request may have come, at most so long: there is nothing to compute."""
        ...


class LLMEngine:
    """Runs requests: `run_requests` takes all at once, `add_requests` and `run` those that come one by one; never both
    at a time. `add_request`, `step` and `abort_request` are for prompts whose outputs are shown while they grow.

    The TP ranks of a replica, and replicas that share experts, make the same calls in the same order.
    """

    def __init__(self, config: VllmConfig, core: EngineCore, tokenizer: LazyTokenizer | None = None) -> None:
        self.config, self.core = config, core
        self.processor = Processor(config, tokenizer)
        padded_sizes = () if config.compilation.enforce_eager else config.compilation.cudagraph_capture_sizes
        self.rebalancer = Rebalancer(
            config.parallel.rebalance_steps,
            padded_sizes,
            core.scheduler,
            core.parallel,
            core.device,
            lambda: core.worker.cache.caches,
            self.processor.watch_stop_strings,
        )
        self._streams: dict[str, OutputStream] = {}  # of unfinished prompts of `add_request`, by request id
        self._is_anyone_busy = False  # here or in a replica that steps or balances with this one, as of the last step

    @property
    def model_config(self) -> ModelConfig:
        """Under vLLM's name: clients read ``max_model_len`` from it."""
        return self.config.model

    @property
    def model_executor(self) -> SimpleNamespace:
        """Under vLLM's name: ``driver_worker.model_runner.model.load_weights`` of it is `LLM.load_weights`."""
        model = SimpleNamespace(load_weights=lambda pairs: self.core.idle_worker("load_weights").weights.load(pairs))
        return SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)))

    def run_requests(
        self,
        requests: Sequence[Request],
        limits: StepLimits | None = None,
        on_finished: Callable[[Request], None] | None = None,
        source: RequestSource | None = None,
    ) -> None:
        """Run requests to their end, or to the end of the first step that reaches a limit; they then hold the results.

        `on_finished` is called with each request that finishes in this process, at once; with rebalancing some are
        copies of other replicas' requests. RuntimeError while others run or the engine sleeps.
        """
        self.require_idle()
        self._queue(requests)
        with frozen_gc_heap(), self._all_or_nothing():
            self.run(limits or StepLimits(), on_finished, source)
            self.core.scheduler.withdraw_all()
            self.rebalancer.bring_home()

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue new requests, or those of `withdraw`, behind the others of their priority, for `run`.

        ValueError, before any is queued, lists those that cannot be run; RuntimeError while the engine sleeps.
        """
        if self.rebalancer.interval:
            raise ValueError("add_requests: only requests of run_requests may move; set rebalance_interval=0")
        self._queue(requests)

    def run(
        self,
        limits: StepLimits,
        on_finished: Callable[[Request], None] | None = None,
        source: RequestSource | None = None,
    ) -> list[Request]:
        """Step until no request is left or comes from ``source``, here and in all replicas that step or balance with
        this one, or to a limit; return the requests that have finished.

        These replicas all call it, with or without requests, with the same limits. A step that fails drops all
        requests. While nothing can be computed anywhere, nothing spins.
        """
        finished: list[Request] = []
        self._is_anyone_busy = True  # the first step tells whether other replicas have work
        with self._all_or_nothing():
            self._take(source, [])
            while self._is_anyone_busy:
                ended = self._step(on_finished)
                finished += ended
                self._take(source, ended)
                limits.count_step()
                # Between two rounds replicas make different numbers of steps: they can be cut together at a round only.
                if self._is_anyone_busy and self.rebalancer.is_at_round and self._are_reached(limits):
                    break
        return finished

    def withdraw(self, keeps_cache: bool = False) -> list[Request]:
        """Take all unfinished requests out, the most urgent first, for new weights or another engine; `add_requests`
        continues them.

        Their blocks are freed and will be computed again. With `keeps_cache` requests whose prompts are computed keep
        their blocks until `free_cache` and continue in this engine, whatever weights it has by then.
        """
        requests = self.core.scheduler.unfinished
        self.core.scheduler.withdraw_all(keeps_cache)
        self._streams.clear()
        return requests

    def free_cache(self, requests: Sequence[Request]) -> None:
        """Free the blocks of requests that `withdraw` returned."""
        for request in requests:
            self.core.scheduler.kv.free(request)

    def require_idle(self) -> None:
        """RuntimeError while requests run, or the engine sleeps."""
        if self.core.scheduler.has_unfinished:
            count = len(self.core.scheduler.unfinished)
            raise RuntimeError(f"generate while {count} requests of add_request run: step until they end")
        self.core.require_ready()

    def add_request(self, request_id: str, prompt: PromptType, params: SamplingParams, *, priority: int = 0) -> None:
        """Queue the n samples of a prompt; waiting requests with a lower `priority` run first.

        ValueError for a prompt that cannot be run or an id that is in use, RuntimeError while the engine sleeps.
        """
        self.core.require_ready()
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} belongs to an unfinished request, expected a new one")
        group = self.processor.group("the prompt", request_id, prompt, params)
        self.add_requests(self.processor.samples([group], [priority]))
        self._streams[request_id] = OutputStream(group, params.output_kind, self.processor.decoder(params))

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Drop prompts between two steps; they have no further output. Ids of finished ones are ignored."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                for request in stream.group.unfinished:
                    self.core.scheduler.abort(request)

    def step(self, ends_failed_requests: bool = False) -> list[RequestOutput]:
        """Run one step and return its outputs, as `SamplingParams.output_kind` asks.

        Where replicas share experts, each calls it, with or without requests, while `has_unfinished_requests` of any.
        A step that fails drops all requests. NonFiniteLogitsError when the model computes NaN or infinity, unless
        `ends_failed_requests`: then the requests that get such logits end with finish_reason "error".
        """
        ended = []
        with self._all_or_nothing():
            finished = self._step(ends_failed_requests=ends_failed_requests)
        for request in finished:
            stream = self._streams.get(prompt_of(request.request_id))
            if stream is not None and stream.group.is_finished:
                ended.append(self._streams.pop(stream.group.request_id))
        growing = [stream for stream in self._streams.values() if stream.kind is not RequestOutputKind.FINAL_ONLY]
        return [output for stream in (*ended, *growing) if (output := stream.next()) is not None]

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do: here or, when replicas share experts, as of the last step elsewhere."""
        is_busy_elsewhere = self.config.parallel.steps_in_lockstep and self._is_anyone_busy
        return self.core.scheduler.has_unfinished or is_busy_elsewhere

    def get_num_unfinished_requests(self) -> int:
        """Prompts with samples that have not ended."""
        return len(self._streams)

    def _take(self, source: RequestSource | None, finished: list[Request]) -> None:
        """Queue what has come from ``source``, and note whether more will."""
        if source is None:
            return
        if self.core.is_idle:
            source.wait(_IDLE_S)
        self._queue(source.take(finished))
        self.core.expects_requests = source.is_waiting
        self._is_anyone_busy |= self.core.has_work

    def _queue(self, requests: Sequence[Request]) -> None:
        """Queue all requests or, on a ValueError that lists every problem, none."""
        self.core.require_ready()
        if not requests:
            return
        scheduler = self.core.scheduler
        names = {request.request_id for request in requests}
        known = names.intersection(map(attrgetter("request_id"), scheduler.unfinished))
        problems = [f"request id {name!r} belongs to an unfinished request" for name in sorted(known)]
        problems += [problem for request in requests for problem in self.processor.problems(request)]
        if problems:
            raise ValueError("requests cannot be run:\n" + "\n".join(f"  - {problem}" for problem in problems))
        for request in requests:
            self.processor.watch_stop_strings(request)
            scheduler.add_request(request)

    def _step(
        self, on_finished: Callable[[Request], None] | None = None, ends_failed_requests: bool = False
    ) -> list[Request]:
        """Run one step and, where it is due, a round of the rebalancer; return the requests that have finished.

        In lock-step a replica runs its own requests, then empty steps; all replicas leave at the first exchange in
        which none has work. Otherwise a replica that rebalances and has no work waits for the others' next round.
        """
        finished, is_busy = self.core.step()
        if not ends_failed_requests:
            self.core.require_finite()
        if on_finished is not None:
            for request in finished:
                on_finished(request)
        if not self.config.parallel.steps_in_lockstep:
            is_busy = self.core.has_work
        self._is_anyone_busy = self.rebalancer.after_step(is_busy)
        return finished

    def _are_reached(self, limits: StepLimits) -> bool:
        """Whether a limit is reached; on any of the ranks that step together, where clocks or counts may differ."""
        is_due = limits.are_reached()
        if limits.has_seconds or (limits.has_steps and self.rebalancer.interval):
            return self.core.parallel.is_any(is_due, self.core.device)
        return is_due

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Drops all requests where its block fails."""
        try:
            yield
        except BaseException:
            self.core.drop_requests()
            self.rebalancer.forget()
            self._streams.clear()
            raise
        finally:
            self.core.expects_requests = self.core.is_idle = False
