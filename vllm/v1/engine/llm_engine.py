"""The requests of one process: prompts in, outputs out, one step at a time or until all are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from vllm.config import ModelConfig, VllmConfig
from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.transformers_utils.tokenizer import LazyTokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.executor import ModelExecutor, model_executor
from vllm.v1.engine.output_processor import OutputStream, PromptGroup
from vllm.v1.engine.processor import Processor
from vllm.v1.engine.rebalancer import Rebalancer
from vllm.v1.request import Request, RequestStatus


class LLMEngine:
    """Runs requests: call `step` for requests that come one by one, or `generate` for all at once; never both at a
    time.

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
        self._streams: dict[str, OutputStream] = {}  # of unfinished requests
        self._stream_of: dict[str, OutputStream] = {}  # by the id of an unfinished sample
        self._is_anyone_busy = False

    @property
    def model_config(self) -> ModelConfig:
        """Under vLLM's name: clients read ``max_model_len`` from it."""
        return self.config.model

    @property
    def model_executor(self) -> ModelExecutor:
        """Under vLLM's name: clients load weights through it."""
        return model_executor(self.core)

    def add_request(self, request_id: str, prompt: PromptType, params: SamplingParams, *, priority: int = 0) -> None:
        """Queue the n samples of a prompt; waiting requests with a lower `priority` run first.

        ValueError for a prompt that cannot be run or an id that is in use, RuntimeError while the engine sleeps.
        """
        if self.rebalancer.interval:
            raise ValueError(
                "add_request: requests move between replicas in LLM.generate alone; set rebalance_interval=0"
            )
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} belongs to an unfinished request, expected a new one")
        group = self.processor.group("the prompt", request_id, prompt, params)
        self._add([group], [priority], params.output_kind)

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Drop requests between two steps; they have no further output. Ids of finished requests are ignored."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is None:
                continue
            for request in stream.group.samples:
                if self._stream_of.pop(request.request_id, None) is not None:
                    self.core.scheduler.abort(request)

    def step(self, ends_failed_requests: bool = False) -> list[RequestOutput]:
        """Run one step and return its outputs, as `SamplingParams.output_kind` asks.

        Where replicas share experts, each calls it, with or without requests, while `has_unfinished_requests` of any.
        A step that fails drops all requests. NonFiniteLogitsError when the model computes NaN or infinity, unless
        `ends_failed_requests`: then the requests that get such logits end with finish_reason "error".
        """
        try:
            finished, self._is_anyone_busy = self.core.step()
            if not ends_failed_requests:
                self.core.require_finite()
        except BaseException:
            self._drop_all()
            raise
        return self._outputs_of(finished)

    def run(self, max_steps: int) -> list[RequestOutput]:
        """Run up to `max_steps` steps and return their outputs; stops when no replica that steps with this one has work
        left.

        Replicas that share experts all call it, with or without requests, with the same number.
        """
        outputs: list[RequestOutput] = []
        self._is_anyone_busy = True  # the first step tells whether other replicas have work
        for _ in range(max_steps):
            if not self.has_unfinished_requests():
                break
            outputs += self.step()
        return outputs

    def withdraw(self, keeps_cache: bool = False) -> list[PromptGroup]:
        """Take all unfinished requests out, for new weights or another engine; `resume` continues them.

        Their blocks are freed and will be computed again. With `keeps_cache` requests whose prompts are computed keep
        their blocks until `free_cache` and continue in this engine, whatever weights it has by then.
        """
        self.core.scheduler.withdraw_all(keeps_cache)
        groups = [stream.group for stream in self._streams.values()]
        self._forget_streams()
        return groups

    def free_cache(self, groups: Sequence[PromptGroup]) -> None:
        """Free the blocks of requests that `withdraw` returned."""
        for group in groups:
            for request in group.samples:
                self.core.scheduler.kv.free(request)

    def resume(self, groups: Sequence[PromptGroup]) -> None:
        """Queue what `withdraw` returned, in this order, with its priorities; ValueError as in `add_request`."""
        for group in groups:
            if group.request_id in self._streams:
                raise ValueError(f"request id {group.request_id!r} belongs to an unfinished request")
        self._add(groups, [0] * len(groups), RequestOutputKind.FINAL_ONLY)  # existing samples keep their priorities

    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do: here or, when replicas share experts, as of the last step elsewhere."""
        return bool(self._streams) or (self.config.parallel.steps_in_lockstep and self._is_anyone_busy)

    def get_num_unfinished_requests(self) -> int:
        """Prompts with samples that have not ended."""
        return len(self._streams)

    def generate(
        self,
        groups: Sequence[PromptGroup],
        priorities: Sequence[int],
        max_steps: int | None = None,
        max_seconds: float | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Run every group's samples to their end, or to the end of the first step that reaches a limit; `groups` then
        hold the results.

        A group without samples gets new ones. ValueError, before anything runs, lists every bad prompt. `on_output` is
        called with each prompt as soon as its samples have finished; for a prompt that finished on another replica, at
        the end.
        """
        for name, limit in (("max_steps", max_steps), ("max_seconds", max_seconds)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}={limit} must be positive, or None to run every sample to its end")
        if self._streams:
            raise RuntimeError(f"generate while {len(self._streams)} requests of add_request run: step until they end")
        self._add(groups, priorities, RequestOutputKind.FINAL_ONLY)
        try:
            self._run(max_steps, max_seconds, on_output)
            self.core.scheduler.withdraw_all()
            self.rebalancer.bring_home()
        except BaseException:
            self._drop_all()
            raise
        for stream in self._streams.values():
            if on_output is not None and stream.group.is_finished:
                on_output(stream.group.output(stream.decode))
        self._forget_streams()

    def _run(
        self, max_steps: int | None, max_seconds: float | None, on_output: Callable[[RequestOutput], None] | None
    ) -> None:
        """Step until no request is left, here and in all replicas that step or rebalance with this one, or to the
        limits.

        In lock-step a replica runs its own requests, then empty steps; all replicas leave at the first exchange in
        which none has work. Otherwise a replica that rebalances and has no work waits for the others' next round.
        """
        core, scheduler, parallel = self.core, self.core.scheduler, self.config.parallel
        interval, num_steps, is_anyone_busy = self.rebalancer.interval, 0, True
        total_steps, started = 0, time.monotonic()
        finished: list[Request] = []
        while is_anyone_busy:
            if parallel.steps_in_lockstep:
                finished, is_anyone_busy = core.step()
            elif scheduler.has_unfinished:
                finished, _ = core.step()
                is_anyone_busy = scheduler.has_unfinished
            else:
                finished, is_anyone_busy = [], False
            core.require_finite()
            for stream in self._ended_streams(finished):
                if on_output is not None:  # else the caller builds every output at its end
                    on_output(stream.group.output(stream.decode))
            num_steps, total_steps, is_round = num_steps + 1, total_steps + 1, not interval
            # A step takes as long as the fullest replica's, to whose batch size the graphs and the expert exchange are
            # padded.
            if interval and (num_steps >= interval or not (is_anyone_busy or parallel.steps_in_lockstep)):
                is_anyone_busy, num_steps, is_round = self.rebalancer.balance(), 0, True
            if is_round and is_anyone_busy and not (max_steps is None and max_seconds is None):
                is_due = max_steps is not None and total_steps >= max_steps
                is_due |= max_seconds is not None and time.monotonic() - started >= max_seconds
                # Ranks that step together agree where clocks or step counts may differ.
                if max_seconds is not None or interval:
                    is_due = core.parallel.is_any(is_due, core.device)
                if is_due:
                    return

    def _add(self, groups: Sequence[PromptGroup], priorities: Sequence[int], kind: RequestOutputKind) -> None:
        """Queue all groups or, on a ValueError that lists every problem, none."""
        self.core.require_ready()
        problems = [problem for group in groups for problem in self.processor.problems(group)]
        if problems:
            raise ValueError("prompts cannot be run:\n" + "\n".join(f"  - {problem}" for problem in problems))
        for group, priority in zip(groups, priorities, strict=True):
            if not group.samples:
                self.processor.add_samples(group, priority)
            unfinished = [request for request in group.samples if request.status is not RequestStatus.FINISHED]
            for request in unfinished:
                self.processor.watch_stop_strings(request)
            if unfinished:
                stream = OutputStream(group, kind, self.processor.decoder(group.params), len(unfinished))
                self._streams[group.request_id] = stream
                self._stream_of |= dict.fromkeys((request.request_id for request in unfinished), stream)
            for request in unfinished:
                self.core.scheduler.add_request(request)

    def _outputs_of(self, finished: Iterable[Request]) -> list[RequestOutput]:
        """Return the outputs of the last step, in which these requests finished, for the streams that want them."""
        outputs = [stream.next() for stream in self._ended_streams(finished)]
        outputs += [
            stream.next() for stream in self._streams.values() if stream.kind is not RequestOutputKind.FINAL_ONLY
        ]
        return [output for output in outputs if output is not None]

    def _ended_streams(self, finished: Iterable[Request]) -> list[OutputStream]:
        """Take out and return the streams whose last samples are among these requests."""
        ended = []
        for request in finished:
            stream = self._stream_of.pop(request.request_id, None)
            if stream is None:
                continue  # a request of another replica
            stream.num_unfinished -= 1
            if stream.num_unfinished == 0:
                ended.append(stream)
                del self._streams[stream.group.request_id]
        return ended

    def _drop_all(self) -> None:
        self.core.drop_requests()
        self.rebalancer.forget()
        self._forget_streams()

    def _forget_streams(self) -> None:
        self._streams.clear()
        self._stream_of.clear()
