"""DeepSeek-V3 671B on 256 dies: what a rank's rollout holds and tells others is what its config says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tools.plan.collectives import CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.generation_steps import Workload, count_steps
from tools.plan.platform import PLATFORMS
from tools.plan.rollout import plan_rollout
from tools.plan.worker import PlannedWorker
from tools.plan.world import planned_rank, run_variables
from tools.workshop.bench.models import deepseek_v3_config
from verl.trainer.config import load_config, validate_config
from verl.trainer.config.override_text import override
from verl.workers.weight_sync.plan import TransferPlan
from vllm.config import SchedulerConfig
from vllm.model_executor.model_loader.rank_shards import engine_shards

TOTAL, RESERVED = 64 << 30, 3 << 30
PROMPT, RESPONSE, ROWS, SEQUENCES = 1024, 2048, 64, 64
LAYERS, CHANNELS, HIDDEN, BLOCK = 61, 576, 7168, 16
ABSORBED = 64 * (128 + 128) * 512  # heads of a rank, channels of a key and a value, latent channels
EXCHANGE = "actor_rollout_ref.rollout.expert_exchange="
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization="


@contextmanager
def worker_of(folder: Path, rank: int, *overrides: str) -> Iterator[PlannedWorker]:
    (folder / "config.json").write_text(json.dumps(deepseek_v3_config()))
    config = load_config(
        [
            override("actor_rollout_ref.model.path", folder),
            override("actor_rollout_ref.actor.megatron.dist_checkpointing_path", folder),
            override("data.train_files", folder / "train.parquet"),
            override("data.val_files", folder / "test.parquet"),
            "trainer.hang_timeout_s=0",
            *overrides,
        ],
        config_name="r1_ascend_671b_256die",
        config_dir="recipes/r1_zero/config",
    )
    assert validate_config(config) == []
    planned = PlannedDevice(CollectiveLog(), MemoryMeter())
    with planned_rank(rank, 256, 16, run_variables("ascend")), planned:
        worker = PlannedWorker(config, "npu", 1.0, PLATFORMS["npu"](TOTAL, RESERVED, planned))
        worker.init_model()
        yield worker


def test_rank_of_671b(tmp_path: Path) -> None:
    """Other ranks have the same transfer plan, however tokens are exchanged, and dispatch takes less than gathering."""
    share = 0.6  # of which the cache cannot hold every sequence
    with worker_of(tmp_path, 37, EXCHANGE + "all_gather", SHARE + str(share)) as worker:
        engine = worker.rollout.inference_engine.config
        transfer_plan = worker.rollout_mode.sync.plan
        plan = plan_rollout(worker, ROWS, PROMPT, RESPONSE)
    assert_dispatch_takes_less(tmp_path, transfer_plan)
    held = engine_shards(engine, 37).values()
    weights = sum(
        torch.Size(stop - start for start, stop in slice_.ranges).numel() * slice_.dtype.itemsize for slice_ in held
    )
    copies = LAYERS * ABSORBED * 2  # the contiguous W_UK and W_UV, which no sync brings
    weights += copies
    phases = {phase.name: phase for phase in worker.timeline.phases}
    assert plan.state_bytes["weights"] == weights
    training = phases["onload"].after_bytes
    # The training weights have left before the engine counts its blocks.
    spare = int(share * TOTAL) - RESERVED - weights - int(int(share * TOTAL) * 0.1)
    token_bytes = CHANNELS * 2 * LAYERS
    assert plan.num_blocks == pytest.approx(spare // (token_bytes * BLOCK), abs=2)  # less tables of a few MB
    num_scratch = SEQUENCES // BLOCK
    assert plan.state_bytes["kv_cache"] == (plan.num_blocks + num_scratch) * BLOCK * token_bytes

    # The cache comes when the training weights have left, and both are gone at the end.
    assert phases["wake_weights"].after_bytes == pytest.approx(training + weights, abs=16 << 20)
    assert phases["weight_sync"].peak_bytes <= phases["wake_weights"].after_bytes + plan.sync_bytes["buckets"] + (
        16 << 20
    )
    cache = plan.state_bytes["kv_cache"]
    assert phases["wake_kv_cache"].after_bytes == pytest.approx(weights + cache, abs=16 << 20)
    assert phases["sleep"].after_bytes - plan.state_bytes["graphs"] < 64 << 20  # the graphs stay

    traffic = transfer_plan.traffic()
    assert (plan.sync_bytes["sent"], plan.sync_bytes["received"]) == pytest.approx(
        (traffic.sent[37], traffic.received[37]), rel=1e-4
    )  # parts of a message are aligned
    assert plan.sync_bytes["kept"] + plan.sync_bytes["received"] == pytest.approx(
        weights - copies, rel=0.02
    )  # norms travel as fp32
    prefill, decode = plan.prefill, plan.decode
    assert prefill is not None and decode is not None
    assert (decode.num_steps, decode.num_tokens, prefill.num_tokens) == (RESPONSE, SEQUENCES, 1024)
    # Every rank computes on the tokens of all 128 replicas, whose 8 choices are all carried along.
    rows = 128 * 1024 * 8 * HIDDEN * 2
    assert 3 * rows < prefill.peak_bytes < 4 * rows


def assert_dispatch_takes_less(folder: Path, transfer_plan: TransferPlan) -> None:
    with worker_of(folder, 255, EXCHANGE + "dispatch") as worker:
        is_shared = worker.rollout_mode.sync.plan is transfer_plan
        assert is_shared  # pytest would print both
        plan = plan_rollout(worker, ROWS, PROMPT, RESPONSE)
    prefill, decode = plan.prefill, plan.decode
    assert prefill is not None and decode is not None
    assert prefill.peak_bytes < 1 << 30 and decode.peak_bytes < 1 << 30
    # Each of two TP ranks sends half of its replica's tokens away, and as many choices come, in all calls of a layer.
    for kernel in ("dispatch", "combine"):
        calls = [call for call in decode.calls if call.group == kernel]
        assert sum(call.sent for call in calls) == sum(call.received for call in calls) == 58 * 32 * 8 * HIDDEN


def test_too_small_a_device_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves room for"), worker_of(tmp_path, 0, SHARE + "0.4"):
        pass


def test_steps_of_a_generation() -> None:
    """4 prompts of 16 samples: shared prefixes are computed once; without a shared cache everything is."""
    scheduler = SchedulerConfig(64, 1024, enable_chunked_prefill=True)
    load = Workload(64, 16, 1024, 2048, 12288, 16, True, scheduler, 1)
    steps = count_steps(load)
    assert steps.num_decode == 2048 and steps.num_preemptions == 0
    assert steps.num_computed == 4 * 1024 + 60 + 64 * 2047
    alone = count_steps(Workload(64, 16, 1024, 2048, 12288, 16, False, scheduler, 1))
    assert alone.num_computed == 64 * (1024 + 2047)
    assert alone.prefill is not None and alone.prefill.num_tokens == 1024
    tight = count_steps(Workload(64, 16, 1024, 2048, 4000, 16, False, scheduler, 1))
    assert tight.num_preemptions > 0 and tight.num_computed > alone.num_computed
