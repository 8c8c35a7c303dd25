"""Sleep and wake-up of the rollout engine on the simulator, measured by torch_npu's allocator."""

from __future__ import annotations

import pytest
import torch

from tests.npu.device_memory import held_bytes
from tests.npu.test_graphs import build_npu
from tests.vllm.test_graphs import results_of
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
