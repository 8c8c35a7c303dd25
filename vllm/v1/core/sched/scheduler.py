"""Continuous batching: which requests compute how many tokens in the next step. Pure Python, no torch."""

from __future__ import annotations

from collections import deque

from vllm.config import SchedulerConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus


class Scheduler:
    """First come, first served under a token budget per step.

    Running requests go first, then waiting ones are admitted. Prefill and decode are the same thing: a request computes
    the tokens it has but the cache has not, at most the budget (a chunk). When a running request gets no block, the one
    admitted last gives all of its blocks back and waits at the front to be recomputed with the tokens it has.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._removed: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add_request(self, request: Request) -> None:
        """Queue a request behind all others; one that has run before, here or elsewhere, in front of them."""
        if request.status is RequestStatus.WAITING:
            self.waiting.append(request)
        else:
            self.waiting.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """Take an unfinished request out, between two steps; it gives its blocks back."""
        self.kv.free(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            request.status = RequestStatus.PREEMPTED
            self._removed.append(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; requests are counted as computed only by `update_from_output`."""
        step = SchedulerOutput([], [], [], [], 0)
        budget = self.config.max_num_batched_tokens
        preempted_before = self.num_preemptions
        budget -= self._schedule_running(step, budget)
        if self.num_preemptions == preempted_before:  # a preempted request at once readmitted would only preempt again
            self._admit_waiting(step, budget)
        step.total_num_tokens = sum(step.num_tokens)
        step.removed, self._removed = self._removed, []
        return step

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        allocate, left = self.kv.allocate_slots, budget
        index = 0
        while index < len(self.running) and left > 0:
            request = self.running[index]
            num_new = min(len(request.token_ids) - request.num_computed_tokens, left)
            new_blocks = allocate(request, num_new)
            while new_blocks is None:
                if self._free_waiting():
                    new_blocks = allocate(request, num_new)
                    continue
                # The victim is the last of the running, so it is never one that this step already holds.
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return budget - left
                new_blocks = allocate(request, num_new)
            step.requests.append(request)
            step.num_tokens.append(num_new)
            step.new_block_ids.append(new_blocks)
            left -= num_new
            index += 1
        return budget - left

    def _admit_waiting(self, step: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            if not request.block_ids:
                self.kv.take_cached_prefix(request)
            num_new = len(request.token_ids) - request.num_computed_tokens
            fits = num_new <= budget or self.config.enable_chunked_prefill
            num_new = min(num_new, budget)
            if not fits or self.kv.allocate_slots(request, num_new) is None:
                self.kv.free(request)
                if self._free_waiting():
                    continue
                return
            self.waiting.popleft()
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = request.num_computed_tokens
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            step.requests.append(request)
            step.num_tokens.append(num_new)
            step.new_block_ids.append(None)
            budget -= num_new

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)
        self._removed.append(request)

    def _free_waiting(self) -> bool:
        """Take the blocks of waiting requests, which came from another replica with their cache; whether any had some.

        They are the first to give, or they could keep the blocks that every running request waits for.
        """
        holders = [request for request in self.waiting if request.block_ids]
        for request in holders:
            self.kv.free(request)
        return bool(holders)

    def update_from_output(self, step: SchedulerOutput, token_ids: list[int], logprobs: list[float]) -> list[Request]:
        """Count the step as computed and hand out its samples; returns the requests that finished, their blocks given
        back.

        token_ids and logprobs (floats, natural log) hold one entry for each request of the step that has no uncomputed
        token left, in the step's order.
        """
        finished: list[Request] = []
        samples = iter(zip(token_ids, logprobs, strict=True))
        for request, num_new in zip(step.requests, step.num_tokens, strict=True):
            request.num_computed_tokens += num_new
            if request.num_computed_tokens < len(request.token_ids):
                continue  # a chunk of a prompt: its last row's prediction is a token we already have
            token, logprob = next(samples)
            if request.append(token, logprob):
                finished.append(request)
        if finished:
            for request in finished:
                self._finish(request)
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return finished

    def abort_all(self) -> None:
        """Drop every request and free its blocks; what a failed step wrote to the cache is forgotten."""
        for request in self.running:
            self._finish(request)
        for request in self.waiting:
            self.kv.free(request)
            request.status = RequestStatus.FINISHED
        self.running, self.waiting = [], deque()
        self.kv.reset_prefix_cache()

    def _finish(self, request: Request) -> None:
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        self._removed.append(request)
