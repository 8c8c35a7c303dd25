"""What sleep gives back, measured by the process's resident memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from tests.vllm.test_lifecycle import PARAMS, build
from tests.vllm.test_parity import as_inputs, make_prompts
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM
from vllm.platforms.cpu import CpuPlatform

LARGE = {"vocab_size": 8192, "hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 1024}
MIB = 2**20


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def fill_cache(llm: LLM) -> None:
    """Zeroed pages are not resident until something writes them, as a full cache would have."""
    for cache in llm.core.worker.cache.caches:
        for pages in cache:
            pages.fill_(1)


def test_sleep_returns_what_wake_up_took(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **LARGE)
    weights = random_weights(TINY | LARGE)
    llm = build(path, num_gpu_blocks_override=16384)
    prompts = as_inputs(make_prompts(6, 20))
    for cycle in range(2):
        llm.sleep(2)
        asleep = resident()
        llm.wake_up(["weights"])
        llm.update_weights(weights.items())
        llm.wake_up(["kv_cache"])
        fill_cache(llm)
        llm.generate(prompts, PARAMS)
        awake, report = resident(), llm.get_memory_report()
        held = report["weights_bytes"] + report["kv_cache_bytes"]
        llm.sleep(2)
        returned, taken = awake - resident(), awake - asleep
        if cycle:  # the first generation also makes what outlives every sleep
            assert returned >= 0.98 * taken, (cycle, returned / MIB, taken / MIB)
            assert taken >= 0.98 * held > 90 * MIB, (taken / MIB, held / MIB)  # nothing waited in the allocator
        llm.wake_up()
        llm.update_weights(weights.items())


def test_tags_free_one_thing_and_level_1_keeps_the_weights(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    awake = llm.get_memory_report()
    expected = [o.outputs[0].token_ids for o in llm.generate(as_inputs(make_prompts(6, 20)), PARAMS)]
    llm.sleep(1, tags=["kv_cache"])
    report = llm.get_memory_report()
    assert report["kv_cache_bytes"] == 0 and report["weights_bytes"] == awake["weights_bytes"]
    llm.update_weights(random_weights(TINY).items())  # while the cache sleeps
    llm.wake_up()
    llm.sleep(1, tags=["weights"])
    report = llm.get_memory_report()
    assert report["weights_bytes"] == 0 and report["kv_cache_bytes"] == awake["kv_cache_bytes"]
    with pytest.raises(RuntimeError, match="weights"):
        llm.generate(as_inputs([[3]]), PARAMS)
    llm.wake_up(["weights"])
    assert [o.outputs[0].token_ids for o in llm.generate(as_inputs(make_prompts(6, 20)), PARAMS)] == expected
    with pytest.raises(ValueError, match=r"sleep tags \['cache'\] are unknown"):
        llm.sleep(1, tags=["cache"])


@pytest.mark.parametrize("num_cycles", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_many_cycles_do_not_grow(tmp_path: Path, num_cycles: int) -> None:
    llm = build(write_checkpoint(tmp_path), num_gpu_blocks_override=256)
    weights = random_weights(TINY)
    prompts = as_inputs(make_prompts(2, 8))
    sizes = []
    for cycle in range(num_cycles):
        level = 1 + cycle % 2
        llm.sleep(level)
        llm.wake_up(["weights"])
        if level == 2:
            llm.update_weights(weights.items())
        llm.wake_up(["kv_cache"])
        if (cycle + 1) % (num_cycles // 10) == 0:
            llm.generate(prompts, PARAMS)
            sizes.append(resident())
    tensors = num_tensors()
    llm.sleep(2)
    llm.wake_up()
    llm.update_weights(weights.items())
    assert num_tensors() <= tensors
    assert sizes[-1] - sizes[2] < num_cycles / 200 * MIB, [size / MIB for size in sizes]


def test_free_memory_that_the_allocators_variables_keep_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CpuPlatform()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    platform.empty_cache()
    blocks = [torch.ones(16 << 10) for _ in range(1024)]  # 64 MiB, each too small for a mapping of its own
    del blocks[:-1]  # the last one holds the end of the heap
    held = resident()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**32))
    platform.empty_cache()
    assert held - resident() < 8 * MIB
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    platform.empty_cache()
    assert held - resident() > 48 * MIB
