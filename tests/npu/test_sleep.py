"""Sleep and wake-up of the rollout engine on the simulator, measured by torch_npu's allocator."""

from __future__ import annotations

import json

import pytest
import torch

from tests.npu.device_memory import held_bytes
from tests.npu.processes import output_of
from tests.npu.test_graphs import build_npu
from tests.parallel.launcher import run_ranks
from tests.vllm.test_graphs import results_of
from tests.vllm.test_parallel import EXPERTS
from tests.vllm.tiny import TINY, random_weights, write_checkpoint

# What a process keeps once it has used a device, whatever the engine does: rotary tables, noise keys, masks, buffers.
SLACK_BYTES = 6 * 2**20
NUM_CYCLES = 3


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_cycles_give_all_memory_back_and_keep_the_results(
    enforce_eager: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    torch.ones(1, device="npu")
    before = held_bytes()
    llm = build_npu(path, enforce_eager=enforce_eager, num_gpu_blocks_override=3000)
    expected, logprobs = results_of(llm)
    num_blocks = llm.get_memory_report()["num_gpu_blocks"]
    asleep, reserved, awake = [], [], []
    for _ in range(NUM_CYCLES):
        llm.sleep(2)
        asleep.append(held_bytes())
        reserved.append(torch.npu.memory_reserved())
        llm.wake_up(["weights"])
        llm.load_weights(random_weights(TINY).items())
        llm.wake_up(["kv_cache"])
        tokens, again = results_of(llm)
        assert tokens == expected and torch.equal(again, logprobs)
        assert llm.get_memory_report()["num_gpu_blocks"] == num_blocks
        awake.append(held_bytes())
    for measured in (asleep, reserved, awake):
        assert measured == [measured[0]] * NUM_CYCLES
    assert asleep[0] - before < SLACK_BYTES < awake[0] - asleep[0]


# Four sleeps with a training phase in each; something new stays behind in the third. Prints whether all results equal
# the first ones, and how many captures and kept graphs there were by then.
GRAPHS_OVER_SLEEPS = """
    import json
    import tempfile
    import torch
    from pathlib import Path
    from tests.npu.test_graphs import build_npu
    from tests.vllm.test_graphs import results_of
    from tests.vllm.tiny import TINY, random_weights, write_checkpoint

    WIDE = {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 1024, "vocab_size": 1024}
    MIB = 2**20

    def allocate(mib): return torch.zeros(mib * MIB, dtype=torch.uint8, device="npu")

    path = write_checkpoint(Path(tempfile.mkdtemp()), **WIDE)
    llm = build_npu(path, enforce_eager=False, dtype="bfloat16", num_gpu_blocks_override=6000)
    graphs, (expected, logprobs), seen = llm.core.worker.graphs, results_of(llm), []
    for cycle in range(4):
        llm.sleep(2)
        training = [allocate(40) for _ in range(5)]
        if cycle == 2:
            left_behind = allocate(3)
        del training
        llm.core.platform.empty_cache()
        llm.wake_up(["weights"])
        llm.load_weights(random_weights(TINY | WIDE).items())
        llm.wake_up(["kv_cache"])
        tokens, again = results_of(llm)
        is_equal = tokens == expected and torch.equal(again, logprobs)
        seen.append((is_equal, graphs.num_captures, graphs.num_kept_over_sleep))
    print(json.dumps(seen))
"""


def test_graphs_are_kept_where_memory_comes_back_to_its_addresses() -> None:
    """The first wake-up moves what was allocated between other things, and the third what a new tenant displaces."""
    seen = json.loads(output_of(GRAPHS_OVER_SLEEPS, 200, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True"))
    assert seen == [[True, 2, 0], [True, 2, 1], [True, 3, 1], [True, 3, 2]]


def test_graphs_are_captured_again_where_memory_moves() -> None:
    """Without expandable segments the allocator takes every segment anew."""
    seen = json.loads(output_of(GRAPHS_OVER_SLEEPS, 200, PYTORCH_NPU_ALLOC_CONF="expandable_segments:False"))
    assert [is_equal for is_equal, _, _ in seen] == [True] * 4
    assert all(captures + kept == 1 + len(seen[: i + 1]) for i, (_, captures, kept) in enumerate(seen))
    assert seen[-1][1] > 1


def captures_after_a_sleep(path: str) -> tuple[bool, int]:
    """One of two replicas in lock-step, the first of which loses its graphs: are the samples equal, and captures."""
    llm = build_npu(path, enforce_eager=False, data_parallel_size=2, **EXPERTS)
    expected, _ = results_of(llm)
    graphs = llm.core.worker.graphs
    assert graphs is not None
    llm.sleep(1)
    llm.wake_up()
    if llm.config.parallel.replica == 0:
        graphs.drop()
    return results_of(llm)[0] == expected, graphs.num_captures


def test_a_rank_may_capture_again_while_the_others_replay(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    assert run_ranks(captures_after_a_sleep, 2, path, device="npu") == [(True, 2), (True, 1)]
