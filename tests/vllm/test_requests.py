"""The life of a request: step by step outputs, priorities, abort, and generations that are cut and gone on with."""

from __future__ import annotations

import gc
import io
import pickle
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm.utils
from tests.parallel.launcher import run_ranks
from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.text_model import VOCAB_SIZE, write_text_checkpoint
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM, RequestOutput, SamplingParams
from vllm.outputs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.utils import frozen_gc_heap
from vllm.v1.engine.llm_engine import StepLimits
from vllm.v1.engine.output_processor import PromptGroup
from vllm.v1.engine.request_codec import decode, encode
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.extras import SamplingExtras

SIZES: dict[str, Any] = {"max_model_len": 80, "max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 4}
PROMPTS = as_inputs(make_prompts(7, 20, seed=3))
PARAMS = [SamplingParams(n=1 + i % 3, seed=i, max_tokens=5 + 4 * i, temperature=0.9, logprobs=i % 2) for i in range(7)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_checkpoint(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> LLM:
    return LLM(checkpoint, **SIZES)


def samples(outputs: list[RequestOutput]) -> list[Any]:
    """What a run without a cut must equal; log-probs apart, which another batch rounds otherwise."""
    return [
        [(s.index, s.token_ids, s.text, s.finish_reason, s.stop_reason) for s in output.outputs] for output in outputs
    ]


def assert_as_good(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert samples(outputs) == samples(expected)
    for output, other in zip(outputs, expected, strict=True):
        for a, b in zip(output.outputs, other.outputs, strict=True):
            assert a.sampled_logprobs == pytest.approx(b.sampled_logprobs, abs=1e-5)
            assert [list(entry) for entry in a.top_logprobs or []] == [list(entry) for entry in b.top_logprobs or []]
            assert len(a.policy_versions) == len(a.token_ids)


def groups_of(llm: LLM, params: list[SamplingParams]) -> list[PromptGroup]:
    """All prompts, still without samples."""
    group = llm.engine.processor.group
    return [group(f"prompt {i}", f"r{i}", prompt, params[i]) for i, prompt in enumerate(PROMPTS)]


def assert_idle(llm: LLM) -> None:
    pool = llm.core.scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_blocks and not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_steps_show_what_a_generation_returns(kind: RequestOutputKind, llm: LLM) -> None:
    """Requests that come at random times."""
    params = [replace(p, output_kind=kind) for p in PARAMS]
    expected = llm.generate(PROMPTS, params)
    rng, left, seen = random.Random(kind.value), list(range(7)), dict[str, list[RequestOutput]]()
    while left or llm.engine.has_unfinished_requests():
        if left and rng.random() < 0.4:
            index = left.pop()
            llm.engine.add_request(f"r{index}", PROMPTS[index], params[index])
        for output in llm.engine.step():
            seen.setdefault(output.request_id, []).append(output)
    assert_idle(llm)
    for index, whole in enumerate(expected):
        outputs = seen[f"r{index}"]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        for sample in whole.outputs:
            parts = [s for output in outputs for s in output.outputs if s.index == sample.index]
            assert all(part.finish_reason is None for part in parts[:-1])
            if kind is RequestOutputKind.CUMULATIVE:
                lengths = [len(part.token_ids) for part in parts]
                assert lengths == list(range(1, len(sample.token_ids) + 1))
                assert all(sample.text.startswith(part.text) for part in parts)
                parts = parts[-1:]
            assert [t for part in parts for t in part.token_ids] == sample.token_ids
            assert "".join(part.text for part in parts) == sample.text
            logprobs = [value for part in parts for value in part.sampled_logprobs]
            assert logprobs == pytest.approx(sample.sampled_logprobs, abs=1e-5)
            assert parts[-1].cumulative_logprob == pytest.approx(sample.cumulative_logprob, abs=1e-4)
            assert parts[-1].finish_reason == sample.finish_reason
            assert sum(len(part.policy_versions) for part in parts) == len(sample.token_ids)


def test_an_aborted_request_gives_its_blocks_back_and_says_nothing_more(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    [expected] = llm.generate(PROMPTS[0], params)
    for name in ("kept", "running", "waiting"):
        llm.engine.add_request(name, PROMPTS[0], params)
    outputs = [*llm.engine.step(), *llm.engine.step()]
    assert {output.request_id for output in outputs} == {"kept", "running"}
    llm.engine.abort_request(["running", "waiting", "never seen"])
    assert llm.engine.get_num_unfinished_requests() == 1
    llm.engine.add_request("running", PROMPTS[1], params)  # its name is free again
    llm.engine.abort_request(["running"])
    while llm.engine.has_unfinished_requests():
        more = llm.engine.step()
        assert {output.request_id for output in more} == {"kept"}
        outputs += more
    assert_idle(llm)
    for sample in expected.outputs:
        parts = [s for o in outputs if o.request_id == "kept" for s in o.outputs if s.index == sample.index]
        assert [token for part in parts for token in part.token_ids] == sample.token_ids


def test_bad_requests_are_refused_before_anything_is_queued(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="request id 'a' belongs to an unfinished request"):
        engine.add_request("a", PROMPTS[0], SamplingParams())
    with pytest.raises(ValueError, match="the prompt has 90 tokens, the limit is 79"):
        engine.add_request("b", {"prompt_token_ids": [3] * 90}, SamplingParams())
    with pytest.raises(RuntimeError, match="1 requests of add_request run"):
        llm.generate(PROMPTS[0])
    assert engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        engine.step()
    for limit in ({"max_steps": 0}, {"max_seconds": -1.0}):
        with pytest.raises(ValueError, match="must be positive"):
            llm.generate(PROMPTS[0], **limit)
    with pytest.raises(ValueError, match="7 prompts came with 1 priority"):
        llm.generate(PROMPTS, priority=[1])
    with pytest.raises(ValueError, match="prompt 1 is a finished RequestOutput"):
        llm.generate([PROMPTS[0], llm.generate(PROMPTS[1])[0]])
    assert_idle(llm)


def test_prompts_end_by_priority_and_are_told_of_at_once(checkpoint: str) -> None:
    llm = LLM(checkpoint, **(SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 80}))
    told: list[tuple[str, int]] = []
    outputs = llm.generate(
        PROMPTS[:4],
        SamplingParams(max_tokens=3, ignore_eos=True, seed=1),
        priority=[2, 0, -1, 0],
        on_output=lambda output: told.append((output.request_id, llm.core.num_steps)),
    )
    names = [output.request_id for output in outputs]
    assert [names.index(name) for name, _ in told] == [2, 1, 3, 0]
    assert [num_steps for _, num_steps in told] == [3, 6, 9, 12]


def test_no_step_waits_for_a_walk_over_all_objects_of_the_process(llm: LLM) -> None:
    frozen: list[int] = []
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=2), on_output=lambda _: frozen.append(gc.get_freeze_count()))
    assert len(frozen) == 2 and all(frozen) and gc.get_freeze_count() == 0


def test_the_heap_is_frozen_where_python_starts_with_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    of_python = gc.get_freeze_count()
    monkeypatch.setattr(vllm.utils, "_FROZEN_AT_START", of_python)
    made_since = [[number] for number in range(64)]
    with frozen_gc_heap():
        assert gc.get_freeze_count() >= of_python + len(made_since)
        with frozen_gc_heap():
            pass
        assert gc.get_freeze_count() > of_python  # the outer one ends it
    assert gc.get_freeze_count() == 0


def gone_on_with(llm: LLM, other: LLM, limit: dict[str, Any]) -> tuple[list[RequestOutput], int]:
    """All prompts in parts up to `limit`, in turns by both engines; and how many parts it took."""
    todo: list[Any] = list(enumerate(PROMPTS))
    done: dict[int, RequestOutput] = {}
    num_parts = 0
    while todo:
        engine = (llm, other)[num_parts % 2]
        params = [PARAMS[index] for index, _ in todo]
        outputs = engine.generate([prompt for _, prompt in todo], params, **limit)
        assert_idle(engine)
        for (index, _), output in zip(todo, outputs, strict=True):
            assert output.finished == (output.resumable is None)
            assert output.finished == all(s.finish_reason in ("stop", "length") for s in output.outputs)
            done[index] = output
        todo = [
            (index, pickle.loads(pickle.dumps(output)))
            for (index, _), output in zip(todo, outputs, strict=True)
            if not output.finished
        ]
        num_parts += 1
    return [done[index] for index in range(len(PROMPTS))], num_parts


@pytest.mark.parametrize(
    ("prefix_caching", "limit"), [(True, {"max_steps": 5}), (False, {"max_steps": 3}), (True, {"max_seconds": 1e-9})]
)
def test_a_cut_generation_ends_as_if_it_had_not_been_cut(
    prefix_caching: bool, limit: dict[str, Any], checkpoint: str, llm: LLM
) -> None:
    sizes = SIZES | {"enable_prefix_caching": prefix_caching}
    first, other = LLM(checkpoint, **sizes), LLM(checkpoint, **(sizes | {"num_gpu_blocks_override": 30}))
    outputs, num_parts = gone_on_with(first, other, limit)
    assert_as_good(outputs, llm.generate(PROMPTS, PARAMS))
    assert num_parts > 5


def test_every_token_knows_the_policy_that_drew_it(checkpoint: str) -> None:
    """Weights that change between two parts: the versions tell where, and the tokens from there on are the new ones."""
    config = TINY | {"vocab_size": VOCAB_SIZE}
    new = random_weights(config, seed=1)
    llm, fresh = LLM(checkpoint, **SIZES), LLM(checkpoint, **SIZES)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, n=2)
    cut = llm.generate(PROMPTS, params, max_steps=8)
    llm.update_weights(new.items(), version=7)
    outputs = llm.generate(cut, priority=[-1] * len(cut))
    fresh.update_weights(new.items(), version=7)
    assert any(sample.token_ids for output in cut for sample in output.outputs)
    for before, output in zip(cut, outputs, strict=True):
        assert output.finished and before.finished is False
        for early, sample in zip(before.outputs, output.outputs, strict=True):
            count = len(early.token_ids)
            assert sample.token_ids[:count] == early.token_ids
            assert sample.sampled_logprobs[:count] == early.sampled_logprobs
            assert sample.policy_versions == [0] * count + [7] * (20 - count)
            if count == 20:
                continue
            prompt = {"prompt_token_ids": [*output.prompt_token_ids, *early.token_ids]}
            rest = fresh.generate(prompt, SamplingParams(max_tokens=20 - count, ignore_eos=True, temperature=0))
            assert sample.token_ids[count:] == rest[0].outputs[0].token_ids


def test_requests_withdrawn_between_runs_of_some_steps_go_on_here_and_elsewhere(checkpoint: str, llm: LLM) -> None:
    """By object in the same engine and by array in another one; in between others generate."""
    expected = llm.generate(PROMPTS, PARAMS)
    engine, groups = llm.engine, groups_of(llm, PARAMS)
    engine.add_requests(engine.processor.samples(groups[:4], [0] * 4))
    engine.run(StepLimits(7))
    engine.add_requests(engine.withdraw())
    engine.add_requests(engine.processor.samples(groups[4:], [0] * 3))
    engine.run(StepLimits(5))
    withdrawn = engine.withdraw()
    assert_idle(llm)
    assert samples(llm.generate(PROMPTS[:2], PARAMS[:2])) == samples(expected[:2])
    other = LLM(checkpoint, **SIZES)
    moved = {request.request_id: request for request in decode(encode(withdrawn))}
    for group in groups:
        group.samples = [moved.get(request.request_id, request) for request in group.samples]
    other.engine.add_requests(list(moved.values()))
    with pytest.raises(ValueError, match="belongs to an unfinished request"):
        other.engine.add_requests(list(moved.values()))
    assert {request.request_id for request in other.engine.run(StepLimits())} == moved.keys()
    assert_idle(other)
    assert other.engine.run(StepLimits(3)) == []
    outputs = [group.output(engine.processor.decoder(group.params)) for group in groups]
    assert all(output.finished for output in outputs)
    assert_as_good(outputs, expected)


def test_samples_of_one_prompt_compute_it_once(checkpoint: str) -> None:
    """However the prompt ends in a block, and whether its samples are one request's or many's."""
    llm = LLM(checkpoint, **(SIZES | {"max_num_seqs": 16, "max_num_batched_tokens": 64}))
    alone = LLM(checkpoint, **(SIZES | {"enable_prefix_caching": False}))
    params, one = (SamplingParams(n=n, max_tokens=9, ignore_eos=True, seed=1) for n in (8, 1))
    for num_prompt in (1, 4, 17, 18, 20, 40):
        rng = random.Random(num_prompt)
        prompt = {"prompt_token_ids": [rng.randrange(2, VOCAB_SIZE) for _ in range(num_prompt)]}
        [expected] = alone.generate(prompt, params)
        [output] = llm.generate(prompt, params)
        assert (expected.num_cached_tokens, output.num_cached_tokens) == (0, 7 * (num_prompt - 1))
        assert_as_good([output], [expected])
        assert [o.num_cached_tokens for o in llm.generate([prompt] * 3, one)] == [num_prompt - 1] * 3


def cut_in_layouts(path: str, layouts: list[dict[str, Any]]) -> list[tuple[Any, Any, int]]:
    """For each layout: samples of a whole run and of one in parts, on this rank; and how many requests moved."""
    results = []
    for layout in layouts:
        llm = LLM(path, **(SIZES | layout))
        replica = llm.config.parallel.replica
        mine = PROMPTS[:5] if replica == 0 else PROMPTS[:1]
        params = [SamplingParams(n=2, seed=i, max_tokens=4 + 5 * i, ignore_eos=True) for i in range(len(mine))]
        whole = llm.generate(mine, params)
        parts: list[Any] = list(mine)
        # Every rank makes as many calls: they generate together.
        for limit in ({"max_steps": 6}, {"max_seconds": 1e-9}, {"max_steps": 6}, {"max_steps": 6}, {}):
            todo = [i for i, part in enumerate(parts) if not (isinstance(part, RequestOutput) and part.finished)]
            outputs = llm.generate([parts[i] for i in todo], [params[i] for i in todo], **limit)
            for i, output in zip(todo, outputs, strict=True):
                parts[i] = output
        results.append((samples(whole), samples(parts), llm.engine.rebalancer.num_moves))
        llm.shutdown()
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_cut_together(world_size: int, checkpoint: str) -> None:
    experts = {"data_parallel_size": 2, "enable_expert_parallel": True}
    layouts: dict[int, list[dict[str, Any]]] = {
        2: [{"tensor_parallel_size": 2}, experts | {"rebalance_interval": 4}],
        4: [experts, experts | {"tensor_parallel_size": 2}, {"data_parallel_size": 4, "rebalance_interval": 3}],
    }
    for rank, results in enumerate(run_ranks(cut_in_layouts, world_size, checkpoint, layouts[world_size])):
        for layout, (whole, parts, num_moves) in zip(layouts[world_size], results, strict=True):
            assert parts == whole, (layout, rank)
            assert (num_moves > 0) == ("rebalance_interval" in layout)


def test_requests_go_on_over_the_cache_that_other_weights_left(tmp_path: Path) -> None:
    """With the same weights they end as if nothing had been; nobody else finds what they hold, and it can be freed."""
    llm = LLM(write_checkpoint(tmp_path), skip_tokenizer_init=True, **SIZES)
    params = [replace(p, logprobs=None, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY) for p in PARAMS]
    expected = llm.generate(PROMPTS, params)
    engine, scheduler, weights = llm.engine, llm.core.scheduler, random_weights(TINY)
    groups = groups_of(llm, params)
    engine.add_requests(engine.processor.samples(groups, [0] * len(groups)))
    for version in range(1, 4):
        engine.run(StepLimits(6))
        withdrawn = engine.withdraw(keeps_cache=True)
        held = [request for request in withdrawn if request.block_ids]
        assert held and all(request.num_computed_tokens >= request.num_prompt_tokens for request in held)
        llm.update_weights(weights.items(), version)
        if version == 2:
            engine.free_cache(withdrawn)
            assert_idle(llm)
        engine.add_requests(withdrawn)
        assert not any(scheduler.kv.pool.find(number) for request in held for number in request.block_hashes)
    engine.run(StepLimits())
    assert_idle(llm)
    outputs = [group.output(None) for group in groups]
    assert_as_good(outputs, expected)
    assert {version for output in outputs for s in output.outputs for version in s.policy_versions} == {0, 1, 2, 3}


def test_bytes_of_anything_but_requests_are_refused() -> None:
    for held, problem in (
        (Path("x"), "Path is no part of an unfinished request"),
        (getattr, "no list of requests"),
        ([1], "no list"),
    ):
        with pytest.raises(pickle.UnpicklingError, match=problem):
            decode(np.frombuffer(pickle.dumps(held), dtype=np.uint8))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_requests_that_another_python_saved_are_read(protocol: int) -> None:
    """Python 3.11.0 to 3.11.4 name a member of an enum by getattr, all others call the enum."""
    request = Request("1", [1, 2], max_tokens=3, stop_ids=frozenset({7}), extras=SamplingExtras(stop=("x",)))
    request.status = RequestStatus.PREEMPTED
    for reduced in ((getattr, (RequestStatus, "PREEMPTED")), (RequestStatus, ("preempted",))):

        class Older(pickle.Pickler):
            def reducer_override(self, obj: Any, reduced: Any = reduced) -> Any:
                return reduced if isinstance(obj, RequestStatus) else NotImplemented

        content = io.BytesIO()
        Older(content, protocol).dump([request])
        [found] = decode(np.frombuffer(content.getvalue(), dtype=np.uint8))
        assert found.status is RequestStatus.PREEMPTED
        assert (found.token_ids, found.stop_ids, found.extras) == ([1, 2], {7}, request.extras)


def test_each_output_is_built_once_and_log_probs_as_objects_only_where_asked_for(llm: LLM) -> None:
    """The values are the same in either case: training reads `sampled_logprobs`."""
    built: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in (PromptGroup.output.__code__, Logprob.__init__.__code__):
            built[frame.f_code.co_name] += 1

    def generated(**given: Any) -> list[list[float]]:
        built.clear()
        sys.setprofile(count)
        try:
            outputs = llm.generate(PROMPTS[:2], SamplingParams(n=2, max_tokens=3, seed=1, **given), use_tqdm=False)
        finally:
            sys.setprofile(None)
        return [sample.sampled_logprobs for output in outputs for sample in output.outputs]

    plain = generated()
    assert built == {"output": 2}
    assert generated(logprobs=0) == plain
    assert built["output"] == 2 and built["__init__"] == sum(map(len, plain))
