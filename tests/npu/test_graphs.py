"""Decode steps as ACL graphs on the simulator: captured by the real torch_npu, with renewed host arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import npusim
import numpy as np
import pytest
import torch
import torch_npu

from tests.npu.processes import run_python
from tests.parallel.launcher import run_ranks
from tests.vllm.test_graphs import build, captured_sizes, results_of
from tests.vllm.test_parallel import ALL, EXPERTS, SHARES, run_engines
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM
from vllm.ops import reference
from vllm.ops.contract import DecodeMetadata
from vllm_ascend.compilation.acl_graph import AclGraphPool, TaskUpdates, meaning_of_stream_error
from vllm_ascend.ops import rollout_ops
from vllm_ascend.ops.mla_decode import PAGED_LATENT, PAGED_ROPE

NPU: dict[str, Any] = {
    "device": "npu",
    "rollout_ops": "vllm_ascend.ops:rollout_ops",
    "block_size": 16,
    "num_gpu_blocks_override": 40,
}
DEVICE = torch.device("npu", 0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def build_npu(path: str, **overrides: Any) -> LLM:
    return build(path, **(NPU | overrides))


def test_graphs_give_the_tokens_and_logprobs_of_eager_steps(path: str) -> None:
    eager, graphs = build_npu(path), build_npu(path, enforce_eager=False, cudagraph_capture_sizes=[4, 8])
    for count in (8, 6, 3, 6):
        (tokens, logprobs), (expected_tokens, expected_logprobs) = results_of(graphs, count), results_of(eager, count)
        assert tokens == expected_tokens
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    assert captured_sizes(graphs) == [4, 8]


def test_one_size_is_captured_unless_others_are_asked_for(path: str) -> None:
    llm = build_npu(path, enforce_eager=False)
    for count in (8, 3, 1):
        results_of(llm, count)
    assert captured_sizes(llm) == [8]


def test_a_choice_that_is_left_open_follows_the_installed_cann(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    for cann, has_graphs in (("8.2.RC1", False), ("8.3.RC1", True)):
        info.write_text(f"version={cann}\n", encoding="utf-8")
        assert (build_npu(path, enforce_eager=None).core.worker.graphs is not None) == has_graphs
    info.write_text("version=8.2.RC1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="need CANN 8.3.RC1 or newer and found 8.2.RC1"):
        build_npu(path, enforce_eager=False)


def test_graphs_hold_over_sleep_and_new_weights(path: str, tmp_path: Path) -> None:
    llm = build_npu(path, enforce_eager=False)
    expected, new = results_of(llm)[0], results_of(build_npu(write_checkpoint(tmp_path, seed=1)))[0]
    llm.load_weights(random_weights(TINY, seed=1).items())
    assert captured_sizes(llm) == [8] and results_of(llm)[0] == new
    for level in (2, 1):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.load_weights(random_weights(TINY).items())
        assert results_of(llm)[0] == expected and captured_sizes(llm) == [8]
    llm.shutdown()
    assert captured_sizes(llm) == []


def test_layouts_with_graphs_equal_one_cpu_process(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices over hccl, collectives inside the graphs: TP, and replicas in lock-step that share experts."""
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    graphs = NPU | {"enforce_eager": False}
    layouts: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"tensor_parallel_size": 2} | graphs, [ALL]),
        ({"data_parallel_size": 2} | EXPERTS | graphs, SHARES),
    ]
    alone = run_engines(path, [({}, [ALL])])[0]
    for rank, results in enumerate(run_ranks(run_engines, 2, path, layouts, device="npu")):
        for (llm_args, shares), result in zip(layouts, results, strict=True):
            mine = shares[rank // llm_args.get("tensor_parallel_size", 1)]
            for index, samples in zip(mine, result, strict=True):
                for (tokens, logprobs), (expected, expected_logprobs) in zip(samples, alone[index], strict=True):
                    assert tokens == expected, (llm_args, rank, index)
                    assert logprobs == pytest.approx(expected_logprobs, abs=1e-5)


CAPTURE_UNTIL_STREAMS_RUN_OUT = """
    import torch
    from vllm_ascend.compilation.acl_graph import AclGraphPool

    x, pool = torch.ones(2, device="npu"), AclGraphPool()
    graphs = [pool.capture(lambda: x + 1)]  # stays: torch_npu takes no capture into a pool that no graph has
    while True:
        graphs.append(pool.capture(lambda: x + 1))
        {give_back}
        print(len(graphs))
        assert len(graphs) < 100
"""


def test_streams_that_run_out_are_explained() -> None:
    done = run_python(CAPTURE_UNTIL_STREAMS_RUN_OUT.format(give_back=""), FAKE_NPU_STREAMS="60")
    assert done.returncode != 0 and 1 < len(done.stdout.splitlines()) < 60
    *_, message = done.stderr.strip().splitlines()
    assert "the device has no stream left. Capture fewer sizes (cudagraph_capture_sizes)" in message
    assert "update the driver to 25.5.1 or newer" in message
    assert "error code is 207008" in done.stderr  # CANN's own words stay in the chain
    done = run_python(CAPTURE_UNTIL_STREAMS_RUN_OUT.format(give_back="graphs[-1].release()"), FAKE_NPU_STREAMS="60")
    assert "AssertionError" in done.stderr and len(done.stdout.splitlines()) == 99


def test_both_errors_of_streams_are_known() -> None:
    older = "error code is 207005 ... EE9999: [SqCqManage]Alloc sq cq fail, stream_id=1984, retCode=0x7020023"
    assert "no queue left for another stream" in (meaning_of_stream_error(older) or "")
    assert meaning_of_stream_error("error code is 507015") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_attention_follows_lengths_and_tables(dtype: torch.dtype) -> None:
    """One layer's decode attention, captured once; lengths change on the host, the rest in the buffers."""
    torch.manual_seed(0)
    heads, block_size, scale = 4, 16, 0.05
    latent_pages = torch.randn(9, block_size, PAGED_LATENT).to(dtype)
    rope_pages = torch.randn(9, block_size, PAGED_ROPE).to(dtype)
    q_latent, q_rope = torch.randn(3, heads, PAGED_LATENT).to(dtype), torch.randn(3, heads, PAGED_ROPE).to(dtype)

    def metadata(lens: list[int], tables: list[list[int]], device: torch.device) -> DecodeMetadata:
        seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        block_tables = torch.tensor(tables, dtype=torch.int32, device=device)
        return DecodeMetadata(np.array(lens), seq_lens, block_tables, block_size)

    steps = [([3, 17, 40], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]), ([48, 1, 16], [[8, 7, 6], [0, 0, 0], [2, 1, 3]])]
    npu_cache = latent_pages.to(DEVICE), rope_pages.to(DEVICE)
    npu_q = q_latent.to(DEVICE), q_rope.to(DEVICE)
    meta = metadata(*steps[0], DEVICE)

    def attend() -> torch.Tensor:
        meta.scratch.clear()
        return rollout_ops().mla_decode(npu_q, npu_cache, meta, scale)

    eager = attend().cpu()
    renewals: list[Callable[[], None]] = []
    meta.renewals = renewals
    graph = AclGraphPool().capture(attend)
    assert bool(renewals) == (dtype != torch.float32)  # only the paged kernel takes lengths from the host
    for step in [*steps, steps[0]]:
        now = metadata(*step, DEVICE)
        meta.seq_lens_host[:] = now.seq_lens_host
        meta.seq_lens.copy_(now.seq_lens)
        meta.block_tables.copy_(now.block_tables)
        graph.replay()
        if renewals:  # the graph has not run with the lengths before: it stands still
            with pytest.raises(RuntimeError, match="waits for an external event that nobody has recorded"):
                torch.npu.synchronize()
        for renew in renewals:
            renew()
        cache = (torch.cat((latent_pages, rope_pages), dim=-1),)
        expected = reference.mla_decode((q_latent, q_rope), cache, metadata(*step, torch.device("cpu")), scale)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(graph.output.cpu(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(graph.output.cpu(), eager)
    graph.release()


def test_each_task_group_waits_for_its_own_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 layers none runs with the factors before, and they do not ask for the current stream one by one."""
    x, outs = torch.ones(2, device=DEVICE), [torch.empty(2, device=DEVICE) for _ in range(8)]
    factors, updates, questions = [1.0] * 8, [], []

    def work() -> torch.Tensor:
        updates.append(TaskUpdates())
        for layer, out in enumerate(outs):
            updates[0].capture(lambda layer=layer, out=out: torch.mul(x, factors[layer], out=out))
        return torch.stack(outs)

    graph = AclGraphPool().capture(work)
    current_stream = torch_npu.npu.current_stream
    monkeypatch.setattr(torch_npu.npu, "current_stream", lambda: questions.append(1) or current_stream())
    for step in range(1, 4):
        factors[:] = [step * 10.0 + layer for layer in range(8)]
        graph.replay()
        updates[0].renew()
        assert graph.output[:, 0].tolist() == factors
        assert len(questions) <= 2 * step  # ours, and one inside torch_npu
    graph.release()


@pytest.mark.parametrize(
    ("visible", "message"), [("", "no Ascend device is visible"), ("1", "but 1 devices are visible")]
)
def test_only_visible_devices_are_used(path: str, visible: str, message: str) -> None:
    code = f"from tests.npu.test_graphs import build_npu; build_npu({path!r})"
    done = run_python(code, timeout_s=120, ASCEND_RT_VISIBLE_DEVICES=visible, LOCAL_RANK="1")
    assert done.returncode != 0 and message in done.stderr and f"ASCEND_RT_VISIBLE_DEVICES={visible!r}" in done.stderr


def test_a_bfloat16_model_of_the_paged_kernels_sizes(tmp_path: Path) -> None:
    """All layers renew their lengths and share one workspace; the batch is full, so not a bit may differ."""
    wide = write_checkpoint(tmp_path, kv_lora_rank=PAGED_LATENT, qk_rope_head_dim=PAGED_ROPE)
    eager, graphs = (build_npu(wide, dtype="bfloat16", enforce_eager=is_eager) for is_eager in (True, False))
    npusim.reset_calls()
    (tokens, logprobs), (expected, expected_logprobs) = results_of(graphs, 4), results_of(eager, 4)
    assert tokens == expected and torch.equal(logprobs, expected_logprobs)
    assert "npu_fused_infer_attention_score.out" in npusim.calls()
