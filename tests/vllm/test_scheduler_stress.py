"""Any interleaving of add, fork, abort, withdraw, preempt, step and finish keeps every block in the right hands.

Driven by hypothesis over the real scheduler, block manager and batch rows. The model is played by a cache that holds
the tokens themselves: a request whose context is not there, in its own blocks, was given a wrong one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm.config import SchedulerConfig, SpeculativeConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.spec_decode.drafter import Speculation
from vllm.v1.spec_decode.verification import accepted
from vllm.v1.worker.input_batch import InputBatch, prepare_step

MAX_MODEL_LEN, END = 48, 9
LOST = -1


def next_token(request: Request, draft: Sequence[int] = ()) -> int:
    """What the model draws: of the seed and all tokens so far, so that a wrong one changes all that follow."""
    return random.Random(str((request.seed, [*request.token_ids, *draft]))).randrange(END + 1)


class Guesser:
    """Drafts that are mostly right, and go on behind the end of a sequence."""

    num_kinds, is_empty = 1, False

    def draft(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        return [(self._draft_of(request, most), 0) for request in requests]

    def _draft_of(self, request: Request, most: int) -> list[int]:
        wrong, draft = random.Random(str(request.token_ids)), list[int]()
        for _ in range(wrong.randint(0, most)):
            draft.append(next_token(request, draft) if wrong.random() < 0.8 else wrong.randrange(END + 1))
        return draft

    def keep(self, requests: Sequence[Request]) -> None:
        return


class Traffic(RuleBasedStateMachine):
    """One replica under a caller who does everything a caller may."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 5]),
        extra_blocks=st.integers(0, 30),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.sampled_from([0, 1, 3, 20, 100]),
        is_chunked=st.booleans(),
        has_prefix_caching=st.sampled_from([True, True, False]),
        num_drafts=st.sampled_from([0, 0, 1, 3, 7]),
    )
    def build(
        self,
        block_size: int,
        extra_blocks: int,
        max_num_seqs: int,
        extra_budget: int,
        is_chunked: bool,
        has_prefix_caching: bool,
        num_drafts: int,
    ) -> None:
        num_blocks = -(-MAX_MODEL_LEN // block_size) + extra_blocks
        budget = max_num_seqs + extra_budget + (0 if is_chunked else MAX_MODEL_LEN)
        self.config = SchedulerConfig(max_num_seqs, budget, is_chunked)
        speculation = None
        if num_drafts:
            speculation = Speculation(SpeculativeConfig("ngram", num_drafts), Guesser())
        self.scheduler = Scheduler(self.config, KVCacheManager(num_blocks, block_size, has_prefix_caching), speculation)
        self.pool = self.scheduler.kv.pool
        self.batch = InputBatch(max_num_seqs, MAX_MODEL_LEN, block_size)
        self.cache = np.full(num_blocks * block_size, LOST)
        self.block_size, self.version, self.num_added = block_size, 0, 0
        self.withdrawn: list[Request] = []
        self.everyone: list[Request] = []
        self.versions: dict[str, list[int]] = {}  # that each output token was drawn under

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 30),
        count=st.integers(1, 4),
        max_tokens=st.integers(1, 18),
        priority=st.sampled_from([0, 0, 0, -1, 3]),
    )
    def add(self, family: int, length: int, count: int, max_tokens: int, priority: int) -> None:
        """`count` samples of one prompt, which other prompts of the family begin or end in."""
        prompt = [(family * i * i + i // 3) % END for i in range(length)]
        for _ in range(count):
            request = Request(
                str(self.num_added),
                prompt,
                max_tokens=max_tokens,
                seed=self.num_added,
                stop_ids=frozenset({END}),
                priority=priority,
            )
            self.num_added += 1
            self.everyone.append(request)
            self.versions[request.request_id] = []
            self.scheduler.add_request(request)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.scheduler.has_unfinished:
                self.step()

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step.total_num_tokens > 0, "nothing runs, though there is work"
        self.check_step(step)
        rows = self.batch.update(step)
        if step.block_copies:
            pages = self.cache.reshape(-1, self.block_size)
            sources, targets = np.array(step.block_copies).T
            pages[targets] = pages[sources]
        num_drafts = self.batch.write_drafts(step)
        plan = prepare_step(self.batch, rows, np.array(step.num_tokens), num_drafts)
        written: dict[int, int] = {}
        for slot, token in zip(plan.slots_T.tolist(), plan.token_ids_T.tolist(), strict=True):
            assert written.setdefault(slot, token) == token, "two sequences write to one place"
            self.cache[slot] = token
        tokens, sampled = list[int](), step.sampled
        for request, num_new in zip(step.requests, step.num_tokens, strict=True):
            draft = step.drafts.get(request.request_id, [])
            end = request.num_computed_tokens + num_new
            assert self.content(request)[:end] == [*request.token_ids, *draft][:end]
            if request in sampled:
                tokens += [next_token(request, draft[:count]) for count in range(len(draft) + 1)]
        output, counts = SamplerOutput(np.array(tokens, dtype=np.int64), [-1.0] * len(tokens), None), None
        if num_drafts is not None:
            output, counts = accepted(step, output)
        own_rows = np.array([self.batch.row_of[request.request_id] for request in sampled], dtype=np.int64)
        self.batch.append_tokens(own_rows, output.token_ids, counts)
        before = [request.num_output_tokens for request in sampled]
        self.scheduler.update_from_output(step, output.token_ids.tolist(), output.logprobs)
        for request, num_before in zip(sampled, before, strict=True):
            self.versions[request.request_id] += [self.version] * (request.num_output_tokens - num_before)

    def content(self, request: Request) -> list[int]:
        tokens: list[int] = self.cache.reshape(-1, self.block_size)[request.block_ids].flatten().tolist()
        return tokens

    def check_step(self, step: SchedulerOutput) -> None:
        assert step.total_num_tokens <= self.config.max_num_batched_tokens
        assert min(step.num_tokens) >= 1 and len(step.requests) <= self.config.max_num_seqs
        assert {id(request) for request in step.requests} == {id(request) for request in self.scheduler.running}

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice: random.Random) -> None:
        request = choice.choice([*self.scheduler.running, *self.scheduler.waiting])
        self.scheduler.abort(request)
        assert (request.status, request.finish_reason) == (RequestStatus.FINISHED, "abort")

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(choice=st.randoms(use_true_random=False))
    def withdraw(self, choice: random.Random) -> None:
        request = choice.choice([*self.scheduler.running, *self.scheduler.waiting])
        self.scheduler.withdraw(request)
        self.withdrawn.append(request)

    @rule()
    def go_on_with_the_withdrawn(self) -> None:
        for request in self.withdrawn:
            self.scheduler.add_request(request)
        self.withdrawn.clear()

    @rule(is_full=st.booleans(), keeps_cache=st.booleans())
    def new_weights(self, is_full: bool, keeps_cache: bool) -> None:
        """The generation is cut, and what the cache holds is worth nothing any more but to those who keep theirs."""
        cut = [*self.scheduler.running, *self.scheduler.waiting]
        self.withdrawn += cut
        self.scheduler.withdraw_all(keeps_cache and is_full)
        self.scheduler.kv.reset_prefix_cache()
        kept = sorted({block for request in cut for block in request.block_ids})
        pages = self.cache.reshape(-1, self.block_size)
        pages[np.setdiff1d(np.arange(len(pages)), kept)] = LOST
        self.version += 1
        self.scheduler.set_policy_version(self.version)
        if is_full:
            self.go_on_with_the_withdrawn()

    @rule()
    def a_step_fails(self) -> None:
        """What it may have written is not to be found, everybody is dropped."""
        if self.scheduler.has_unfinished:
            self.batch.update(self.scheduler.schedule())
            self.cache[:] = LOST
        self.scheduler.abort_all()

    @invariant()
    def every_block_is_in_the_right_hands(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        holders = Counter(block for request in requests for block in request.block_ids)
        assert all(self.pool.ref_count(block) == holders[block] for block in range(self.pool.num_blocks))
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(holders)
        assert self.scheduler.waiting == sorted(self.scheduler.waiting, key=urgency)
        assert self.scheduler.running == sorted(self.scheduler.running, key=urgency)
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert (request.status is RequestStatus.RUNNING) == (request in self.scheduler.running)
        assert not any(request.block_ids for request in self.everyone if request not in requests)

    def teardown(self) -> None:
        """Everything ends, as it would have ended alone, and leaves nothing behind."""
        if not hasattr(self, "scheduler"):
            return
        self.go_on_with_the_withdrawn()
        for _ in range(100 * (1 + len(self.everyone))):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert self.pool.num_free_blocks == self.pool.num_blocks and not self.scheduler.has_unfinished
        self.batch.update(self.scheduler.schedule())
        assert not self.batch.row_of
        for request in self.everyone:
            assert request.status is RequestStatus.FINISHED
            assert request.policy_versions() == self.versions[request.request_id]
            if request.finish_reason in ("stop", "length"):
                assert request.output_token_ids == drawn_alone(request)


def urgency(request: Request) -> tuple[int, bool, int]:
    return request.priority, request.status is RequestStatus.WAITING, request.arrival


def drawn_alone(request: Request) -> list[int]:
    """The outcome of the same request where nothing else happens."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    again = Request("x", prompt, max_tokens=request.max_tokens, seed=request.seed, stop_ids=request.stop_ids)
    while not again.append(next_token(again), -1.0):
        pass
    return again.output_token_ids


def run_traffic(num_examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )


def test_no_block_is_leaked_or_used_twice() -> None:
    run_traffic(60)


@pytest.mark.slow
def test_no_block_is_leaked_or_used_twice_in_many_runs() -> None:
    run_traffic(3000)
