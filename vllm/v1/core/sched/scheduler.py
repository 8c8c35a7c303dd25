"""Continuous batching: which requests compute how many tokens in the next step. Pure Python, no torch."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from vllm.config import SchedulerConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.drafter import Speculation


class Scheduler:
    """By priority, then first come, first served, under a token budget per step.

    Running requests go first, then waiting ones are admitted. Prefill and decode are the same thing: a request computes
    the tokens it has but the cache has not, at most the budget (a chunk). When a running request gets no block, the
    least urgent one is preempted: its blocks are freed, and it waits to be recomputed with the tokens it has.

    Fairness: every running request computes a token in every step, a long prompt takes what is left of the budget.
    No request is admitted before a more urgent one that waits for blocks, however few blocks it needs. There is one
    exception: while the prompt of a waiting request is being computed for another request, those behind it go ahead for
    that step. A request that has run before, here or elsewhere, is more urgent than one that has not.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, speculation: Speculation | None = None) -> None:
        self.config = config
        self.kv = kv
        self.speculation = speculation
        self.waiting: list[Request] = []  # the most urgent first
        self.running: list[Request] = []  # likewise
        self.num_preemptions = 0
        self.policy_version = 0  # of the weights that tokens are drawn from
        self._num_arrivals = 0
        self._removed: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def unfinished(self) -> list[Request]:
        """Those that run, then those that wait, each the most urgent first."""
        return [*self.running, *self.waiting]

    def add_request(self, request: Request) -> None:
        """Queue a request behind all of its priority; one that has run before in front of those that have not."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        insort(self.waiting, request, key=_urgency)

    def set_policy_version(self, version: int) -> None:
        """Tokens are drawn from new weights from now on."""
        self.policy_version = version
        for request in self.running:
            request.note_policy(version)

    def withdraw(self, request: Request, keeps_cache: bool = False) -> None:
        """Take an unfinished request out between two steps; it can be continued later. Its blocks are freed, unless it
        ``keeps_cache`` and its prompt is computed.
        """
        if keeps_cache and request.num_computed_tokens >= request.num_prompt_tokens:
            self.kv.set_apart(request)
        else:
            self.kv.free(request)
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            request.status = RequestStatus.PREEMPTED
            self._removed.append(request)
        else:
            self.waiting.remove(request)

    def withdraw_all(self, keeps_cache: bool = False) -> None:
        """Take every unfinished request out, as `withdraw`."""
        for request in self.unfinished:
            self.withdraw(request, keeps_cache)

    def abort(self, request: Request) -> None:
        """End an unfinished request, between two steps."""
        self.withdraw(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, "abort"

    def schedule(self) -> SchedulerOutput:
        """Choose the next step; requests are counted as computed only by `update_from_output`."""
        step = SchedulerOutput([], [], [], [], 0)
        preempted_before = self.num_preemptions
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        if self.num_preemptions == preempted_before:  # a preempted request would only preempt again
            self._admit_waiting(step, budget)
        step.total_num_tokens = sum(step.num_tokens)
        if self.speculation is not None:
            step.num_draft_passes = self.speculation.num_passes(len(step.requests))
        step.block_copies = self.kv.take_block_copies()
        step.removed, self._removed = self._removed, []
        return step

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Schedule the running requests, preempting some if needed; returns the remaining budget."""
        drafts = step.drafts
        if self.speculation is not None:
            # Drafts take no block that a running request may need in this step.
            spare_blocks = self.kv.pool.num_free_blocks - len(self.running)
            room = min(budget - len(self.running), spare_blocks * self.kv.block_size)
            drafts |= self.speculation.propose(self.running, room)
        step.new_block_ids += self.kv.allocate_decoding(self.running, drafts)  # in most steps those of all
        index = len(step.new_block_ids)
        for request in self.running[index:] if drafts else ():
            drafts.pop(request.request_id, None)
        step.requests += self.running[:index]
        step.num_tokens += [1 + len(drafts.get(one.request_id, ())) for one in step.requests] if drafts else [1] * index
        budget -= sum(step.num_tokens)
        while index < len(self.running):
            request = self.running[index]
            num_new = len(request.token_ids) - request.num_computed_tokens
            if num_new > 1:  # those behind it compute a token each
                num_new = min(num_new, budget - (len(self.running) - index - 1))
            new_blocks = self._allocate(request, num_new)
            if new_blocks is None:
                break
            step.add(request, num_new, new_blocks)
            budget -= num_new
            index += 1
        return budget

    def _allocate(self, request: Request, num_new: int) -> list[int] | None:
        """Blocks for a running request: free ones, else those of waiting requests, else of the least urgent running
        ones; None when it was the least urgent itself and is preempted.
        """
        while (new_blocks := self.kv.allocate_slots(request, num_new)) is None:
            if self._free_waiting():
                continue
            victim = self.running.pop()  # the last, so it is never one that this step already holds
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _admit_waiting(self, step: SchedulerOutput, budget: int) -> None:
        admitted: list[Request] = []
        for request in tuple(self.waiting):
            if budget <= 0 or len(self.running) + len(admitted) >= self.config.max_num_seqs:
                break
            has_cache = bool(request.block_ids)
            if not has_cache and not self.kv.take_cached_prefix(request):
                continue  # put off: this step computes what it would copy
            num_missing = len(request.token_ids) - request.num_computed_tokens
            num_new = min(num_missing, budget)
            fits = num_new == num_missing or self.config.enable_chunked_prefill
            if not fits or not self._make_room(request, num_new, len(step.requests)):
                if not has_cache:  # else it keeps what it has computed, until a running request needs the blocks
                    self.kv.free(request)
                break
            self.kv.allocate_slots(request, num_new)
            self.waiting.remove(request)
            if request.status is RequestStatus.WAITING:
                request.num_cached_tokens = request.num_computed_tokens
            request.status = RequestStatus.RUNNING
            request.note_policy(self.policy_version)
            admitted.append(request)
            step.add(request, num_new, None)
            budget -= num_new
        for request in admitted:
            insort(self.running, request, key=_urgency)

    def _make_room(self, request: Request, num_new: int, num_running: int) -> bool:
        """Whether there are blocks for the request, if need be those of waiting ones, which lose them only where that
        is enough.

        A preempted request needs blocks for all its tokens, in however many steps they are computed, and one more for
        each that runs. It would soon be preempted again without them, and what it has computed by then would be lost.
        """
        reserve = 0
        if request.status is RequestStatus.PREEMPTED:
            reserve = 0 if request.block_ids else num_running
            num_new = len(request.token_ids) - request.num_computed_tokens
        needed, pool = self.kv.blocks_missing(request, num_new) + reserve, self.kv.pool
        if needed > pool.num_free_blocks:
            holds = Counter(block for other in self.waiting if other is not request for block in other.block_ids)
            num_takable = sum(pool.ref_count(block) == count for block, count in holds.items())
            if needed > pool.num_free_blocks + num_takable:
                return False
        while needed > pool.num_free_blocks and self._free_waiting(request):
            continue
        return needed <= pool.num_free_blocks

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_urgency)
        self._removed.append(request)

    def _free_waiting(self, kept: Request | None = None) -> bool:
        """Take the blocks of the least urgent waiting request that has some, but of `kept`; whether there was one.

        It came from another replica with its cache, or kept that over an update of the weights. Such requests are the
        first to give, or they could keep the blocks that every running request waits for.
        """
        holder = next((one for one in reversed(self.waiting) if one.block_ids and one is not kept), None)
        if holder is not None:
            self.kv.free(holder)
        return holder is not None

    def update_from_output(
        self,
        step: SchedulerOutput,
        token_ids: list[int],
        logprobs: list[float],
        problems: Mapping[str, str] | None = None,
    ) -> list[Request]:
        """Count the step as computed and append its samples; returns the finished requests, whose blocks are freed.

        token_ids and logprobs (floats, natural log) hold one entry for each request of the step that has no uncomputed
        token left, or `num_sampled` of the step, in the step's order. A request whose id is in `problems` ends with
        that error instead.
        """
        finished: list[Request] = []
        samples, counts = iter(zip(token_ids, logprobs, strict=True)), iter(step.num_sampled or ())
        for request, num_new in zip(step.requests, step.num_tokens, strict=True):
            # A chunk of a prompt: its last row's prediction is a token we already have.
            is_chunk = request.num_computed_tokens + num_new < len(request.token_ids)
            own: Sequence[tuple[int, float]] = ()
            if not is_chunk:
                own = (next(samples),) if step.num_sampled is None else list(islice(samples, next(counts)))
            if step.drafts and request.request_id in step.drafts:
                assert self.speculation is not None
                self.speculation.note_verified(request, num_new - 1, len(own) - 1)
                num_new = len(own)
            request.num_computed_tokens += num_new
            if problems and request.request_id in problems:
                request.fail(problems[request.request_id])
                finished.append(request)
                continue
            for token, logprob in own:
                if request.append(token, logprob):  # the drafts behind its end are dropped
                    finished.append(request)
                    break
        if finished:
            for request in finished:
                self._finish(request)
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        self.kv.finish_step()
        return finished

    def abort_all(self) -> None:
        """Drop every request and free its blocks; entries of a failed step are unregistered."""
        for request in self.running:
            self._finish(request)
        for request in self.waiting:
            self.kv.free(request)
            request.status = RequestStatus.FINISHED
        self.running, self.waiting = [], []
        self.kv.reset_prefix_cache()

    def _finish(self, request: Request) -> None:
        self.kv.free(request)
        request.status = RequestStatus.FINISHED
        self._removed.append(request)


def _urgency(request: Request) -> tuple[int, bool, int]:
    """Sorts requests, the most urgent first."""
    return request.priority, request.status is RequestStatus.WAITING, request.arrival
