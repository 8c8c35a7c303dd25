"""Decode steps as captured graphs: padding, buffers, sizes, and their end before memory is freed."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compiler import needs_compiler
from tests.parallel.launcher import run_ranks
from tests.tiny_models import CONFIGS, write_model
from tests.vllm.capturing_platform import DEVICE, CapturingPlatform
from tests.vllm.gathering_ops import PROVIDER as GATHERING
from tests.vllm.test_parallel import ALL, DISPATCH, EXPERTS, SHARES, run_engines
from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM, SamplingParams
from vllm.config import default_capture_sizes
from vllm.ops.cpu.graph import CpuGraphPool

pytestmark = needs_compiler  # a CPU captures the calls of its compiled kernels
GRAPHS = {"enforce_eager": False, "device": DEVICE}
NUM_TOKENS = 10


def build(path: str, **overrides: Any) -> LLM:
    args = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 8, "block_size": 4} | overrides
    return LLM(path, **args)


def results_of(llm: LLM, count: int = 6) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and log-probs [count, NUM_TOKENS] of `count` prompts."""
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=i, ignore_eos=True) for i in range(count)]
    samples = [o.outputs[0] for o in llm.generate(as_inputs(make_prompts(count, 20)), params)]
    return [s.token_ids for s in samples], torch.tensor([s.sampled_logprobs for s in samples])


def platform_of(llm: LLM) -> CapturingPlatform:
    assert isinstance(llm.core.platform, CapturingPlatform)
    return llm.core.platform


def captured_sizes(llm: LLM) -> list[int]:
    assert llm.core.worker.graphs is not None
    return llm.core.worker.graphs.captured_sizes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_graphs_give_the_tokens_and_logprobs_of_eager_steps(path: str) -> None:
    eager, graphs = build(path), build(path, **GRAPHS)
    for count in (8, 6, 3, 6):  # without padding, with it, a second size, the first one again
        (tokens, logprobs), (expected_tokens, expected_logprobs) = results_of(graphs, count), results_of(eager, count)
        assert tokens == expected_tokens
        if count == 8:
            assert torch.equal(logprobs, expected_logprobs)
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=2e-6)
    assert captured_sizes(graphs) == [4, 8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_cpu_captured_gives_the_bits_of_eager_steps(dtype: str, path: str) -> None:
    more = {"dtype": dtype, "enable_return_routed_experts": True}
    eager, captured = build(path, **more), build(path, enforce_eager=False, **more)
    for count in (8, 6, 3, 6):
        (tokens, logprobs), (expected_tokens, expected_logprobs) = results_of(captured, count), results_of(eager, count)
        assert tokens == expected_tokens
        assert torch.equal(logprobs, expected_logprobs)
    assert captured_sizes(captured) == [4, 8]
    for engine in (eager, captured):
        engine.load_weights(random_weights(TINY, seed=1).items())
    assert results_of(captured)[0] == results_of(eager)[0]
    for level in (1, 2):
        for engine in (eager, captured):
            engine.sleep(level)
            engine.wake_up()
            if level == 2:
                engine.load_weights(random_weights(TINY, seed=2).items())
        (tokens, logprobs), (expected_tokens, expected_logprobs) = results_of(captured), results_of(eager)
        assert tokens == expected_tokens and torch.equal(logprobs, expected_logprobs)
    graphs = captured.core.worker.graphs
    assert graphs is not None and (graphs.num_captures, graphs.num_kept_over_sleep) == (2, 4)


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_of_grouped_queries_give_the_bits_of_eager_ones(name: str, dtype: str, tmp_path: Path) -> None:
    path = str(write_model(tmp_path, CONFIGS[name] | {"vocab_size": 160}, seed=3)[0])
    eager, captured = (build(path, dtype=dtype, enforce_eager=plain, block_size=16) for plain in (True, False))
    for count in (8, 6, 3):
        (tokens, logprobs), (expected_tokens, expected_logprobs) = results_of(captured, count), results_of(eager, count)
        assert tokens == expected_tokens
        assert torch.equal(logprobs, expected_logprobs)
    assert captured_sizes(captured) == [4, 8]


def test_what_depends_on_values_is_no_capture() -> None:
    with pytest.raises(RuntimeError, match="nonzero.* cannot be captured"):
        CpuGraphPool().capture(lambda: torch.ones(3).nonzero())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_a_cpu_capture_share_memory_and_its_replays_follow_the_inputs(dtype: torch.dtype) -> None:
    ids, table = torch.tensor([3, 0, 2]), torch.randn(5, 33).to(dtype)
    x, places = torch.randn(3, 33).to(dtype), []

    def model() -> torch.Tensor:
        hidden = torch.nn.functional.embedding(ids, table) + table.index_select(0, ids)
        for _ in range(6):
            hidden = hidden + x
            places.append(hidden.data_ptr())
        hidden = (hidden.float() * 0.5).to(dtype)
        hidden += x
        return hidden

    captured = CpuGraphPool().capture(model)
    assert len(set(places)) <= 3
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        table.copy_(torch.randn(5, 33, generator=generator))
        x.copy_(torch.randn(3, 33, generator=generator))
        ids.copy_(torch.randint(5, (3,), generator=generator))
        captured.replay()
        assert torch.equal(captured.output, model())


def test_padding_writes_into_its_own_blocks_only(path: str) -> None:
    eager, graphs = build(path), build(path, **GRAPHS)
    results_of(eager, 5), results_of(graphs, 5)
    num_blocks = eager.core.worker.cache.num_blocks
    assert graphs.core.worker.cache.num_blocks == num_blocks
    for (pages,), (graph_pages,) in zip(eager.core.worker.cache.caches, graphs.core.worker.cache.caches, strict=True):
        torch.testing.assert_close(graph_pages[:num_blocks], pages, rtol=0, atol=1e-5)
        scratch = graph_pages[num_blocks:].flatten(0, 1)
        assert len(scratch) == 8  # a slot for each row of the largest graph
        assert scratch.any(-1).tolist() == [True] * 3 + [False] * 5  # 5 requests run as 8


def test_a_size_is_captured_once_and_replayed_from_its_second_step(path: str) -> None:
    llm = build(path, **GRAPHS)
    results_of(llm, 5)
    results_of(llm, 7)  # size 8 again
    (pool,) = platform_of(llm).pools
    assert (pool.num_captures, pool.num_released) == (1, 0)
    assert pool.num_replays == 2 * (NUM_TOKENS - 1) - 1  # the first token comes from the prefill


def test_steps_beyond_the_largest_size_run_eagerly(path: str) -> None:
    llm = build(path, cudagraph_capture_sizes=[4, 2, 4], **GRAPHS)
    assert results_of(llm, 5)[0] == results_of(build(path), 5)[0]
    assert platform_of(llm).pools == []
    results_of(llm, 3)
    assert captured_sizes(llm) == [4]


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (64, (1, 2, 4, 8, 16, 32, 64))]
)
def test_default_sizes(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert default_capture_sizes(max_num_seqs) == sizes


def test_sleep_drops_the_graphs_and_all_they_hold(path: str) -> None:
    llm = build(path, **GRAPHS)
    expected, _ = results_of(llm)
    for level in (2, 1, 2):
        pool, caches = platform_of(llm).pools[-1], [weakref.ref(cache[0]) for cache in llm.core.worker.cache.caches]
        llm.sleep(level)
        gc.collect()
        assert captured_sizes(llm) == [] and pool.num_released == pool.num_captures == 1
        assert all(cache() is None for cache in caches)
        llm.wake_up()
        if level == 2:
            llm.load_weights(random_weights(TINY).items())
        assert results_of(llm)[0] == expected
        assert captured_sizes(llm) == [8] and platform_of(llm).pools[-1] is not pool


def test_new_weights_need_no_new_graphs(path: str, tmp_path: Path) -> None:
    llm = build(path, **GRAPHS)
    results_of(llm)
    llm.load_weights(random_weights(TINY, seed=1).items())
    assert results_of(llm)[0] == results_of(build(write_checkpoint(tmp_path, seed=1)))[0]
    assert platform_of(llm).pools[0].num_captures == 1


def test_replicas_in_lockstep_run_the_same_sizes(path: str) -> None:
    # Shares of 2 and 8 prompts, so that replicas pad differently and one is long without work.
    layouts = [({"data_parallel_size": 2} | EXPERTS | GRAPHS, SHARES)]
    expected = run_engines(path, [({}, [ALL])])[0]
    for rank, (result,) in enumerate(run_ranks(run_engines, 2, path, layouts)):
        for index, samples in zip(SHARES[rank], result, strict=True):
            for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(samples, expected[index], strict=True):
                assert tokens == expected_tokens, (rank, index)
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


@pytest.mark.parametrize("shape", ["replicas", "tensor parallel", "replicas, tokens gathered by dispatch"])
def test_steps_of_several_processes_that_a_cpu_captured_give_the_bits_of_eager_ones(path: str, shape: str) -> None:
    """A capture refuses what depends on values."""
    is_replica, is_dispatched = shape.startswith("replicas"), shape.endswith("dispatch")
    layout = {"data_parallel_size" if is_replica else "tensor_parallel_size": 2} | EXPERTS
    layout |= DISPATCH | {"rollout_ops": GATHERING} if is_dispatched else {}
    prompts = SHARES if is_replica else [ALL, ALL]
    layouts = [(layout | {"enforce_eager": is_eager}, prompts) for is_eager in (True, False)]
    for eager, captured in run_ranks(run_engines, 2, path, layouts):
        assert captured == eager


def test_what_cannot_be_captured_is_refused_before_anything_is_built(path: str) -> None:
    with pytest.raises(ValueError, match="not that of the CPU kernels"):
        build(path, enforce_eager=False, device="cpu", rollout_ops="vllm.ops.reference:rollout_ops")
    with pytest.raises(ValueError, match="held in FP8 would be kept"):
        build(path, enforce_eager=False, device="cpu", quantization="fp8")
    with pytest.raises(ValueError, match="expert_exchange=dispatch sends depends on values"):
        build(path, enforce_eager=False, device="cpu", expert_exchange="dispatch", enable_expert_parallel=True)
    with pytest.raises(ValueError, match="mla_decode, fused_experts, .* of the op table"):
        build(path, enforce_eager=False, device="cuda", rollout_ops="vllm.ops.reference:rollout_ops")
    for sizes in ([], [0, 4], [16]):
        with pytest.raises(ValueError, match=r"cudagraph_capture_sizes=.*max_num_seqs=8"):
            build(path, cudagraph_capture_sizes=sizes, **GRAPHS)


def test_every_problem_of_a_config_for_npu_comes_at_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = {"device": "npu", "rollout_ops": "vllm_ascend.ops:rollout_ops"}
    with pytest.raises(ValueError, match="block_size=24 is not supported on npu"):
        build(path, block_size=24, **npu)
    paged = write_checkpoint(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=6)
    with pytest.raises(ValueError, match=r"block_size=24[\s\S]*leaves 6 heads to a rank"):
        build(paged, block_size=24, dtype="bfloat16", **npu)
    with pytest.raises(ValueError, match="of the op table cannot be captured"):
        reference = "vllm.ops.reference:rollout_ops"
        build(path, block_size=16, device="npu", rollout_ops=reference, enforce_eager=False)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(ValueError, match="graphs cannot be captured with TASK_QUEUE_ENABLE=2"):
        build(path, enforce_eager=False, **(npu | {"block_size": 16}))


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_a_missing_torch_npu_is_named(path: str) -> None:
    with pytest.raises(ValueError, match="torch_npu is not installed; install requirements/npu.txt"):
        build(path, device="npu", rollout_ops="vllm_ascend.ops:rollout_ops", block_size=16)
