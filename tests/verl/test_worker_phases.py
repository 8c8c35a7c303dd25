"""What is on the device at every border of a step, and what of a generated batch the controller gets to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.memory_ledger import ON_DEVICE, ledger
from megatron.core.ops import TrainOps
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import ENGINE, config_overrides, prompts
from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig, load_config
from verl.trainer.ppo.sample_records import ROLLOUT, TRAINING
from verl.utils.timeline import Span
from verl.workers.actor import MegatronPPOActor
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.row_store import worker_batch
from vllm.model_executor.model_loader.shard_writer import ShardWriter

# What holds device memory when a call to the rollout engine ends.
MEMORY_ORDER = [
    ("resume weights", {"training weights", "rollout weights"}),
    ("update_weight_shards", {"training weights", "rollout weights"}),
    ("resume kv_cache", {"rollout weights", "kv cache"}),
    ("generate_sequences", {"rollout weights", "kv cache"}),
    ("release", set()),
]


class WatchedRollout(vLLMRollout):
    """The engine, with a note of what the device holds after each call."""

    worker: ActorRolloutRefWorker
    notes: list[tuple[str, set[str]]]

    def _note(self, event: str) -> None:
        report = self.inference_engine.get_memory_report()
        model = self.worker.actor_module
        sizes = {
            "training weights": sum(p.untyped_storage().nbytes() for p in model.module.parameters()),
            "rollout weights": report["weights_bytes"],
            "kv cache": report["kv_cache_bytes"],
        }
        self.notes.append((event, {name for name, num_bytes in sizes.items() if num_bytes}))

    def resume(self, tags: list[str]) -> None:
        super().resume(tags)
        self._note(f"resume {tags[0]}")

    @contextmanager
    def update_weight_shards(self, version: int) -> Iterator[ShardWriter]:
        with super().update_weight_shards(version) as writer:
            yield writer
        self._note("update_weight_shards")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        output = super().generate_sequences(prompts)
        self._note("generate_sequences")
        return output

    def release(self) -> None:
        super().release()
        self._note("release")


def one_step(model_dir: str) -> dict[str, Any]:
    """Validation, then a generation that is trained on; what was seen."""
    worker = ActorRolloutRefWorker(load_config(config_overrides(model_dir, 1)), "actor_rollout_ref")
    worker.init_model()
    rollout: Any = worker.rollout
    rollout.__class__ = WatchedRollout  # the manager holds this very object
    assert isinstance(rollout, WatchedRollout)
    rollout.worker, rollout.notes = worker, []
    batch = prompts()
    batch.meta_info["validate"] = True
    validation = worker.generate_sequences(batch)
    rollout.notes.clear()
    worker.begin_timeline()
    kept = worker.generate_sequences(prompts())
    timing = dict(kept.meta_info["timing"])
    request = DataProto(kept.batch, meta_info={"temperature": 1.0}, row_refs=kept.row_refs)
    scored = worker.compute_log_prob(request)
    worker.compute_ref_log_prob(request)
    rows = DataProto(kept.batch, row_refs=kept.row_refs).union(scored).select_idxs([3, 0])
    return {
        "fetched": worker.fetch_columns(worker_batch(rows), (ROLLOUT, TRAINING)).batch,
        "is_response": rows.batch["response_mask"],
        "timing": timing,
        "recording": worker.take_timeline(),
        "after": worker.take_timeline().spans,
        "notes": rollout.notes,
        "validation": sorted(validation.batch.keys()),
        "training": sorted(kept.batch.keys()),
        "remote": list(kept.row_refs.columns),
        "returned_bytes": kept.num_tensor_bytes / kept.batch["responses"].numel(),
    }


def assert_spans(spans: list[Span], timing: dict[str, float]) -> None:
    """Every part of a call lies inside it, in its order, and lasts as long as the worker says."""
    parts = {
        "generate_sequences": [
            "onload",
            "wake_weights",
            "weight_sync",
            "offload",
            "wake_kv_cache",
            "generate",
            "sleep",
        ],
        "compute_log_prob": ["onload", "fetch_rows"],
        "compute_ref_log_prob": ["onload", "fetch_rows", "offload"],
    }
    calls = {span.name: span for span in spans if span.name in parts}
    assert list(calls) == list(parts)
    for name, call in calls.items():
        inside = [s for s in spans if s is not call and call.start_s <= s.start_s <= s.end_s <= call.end_s]
        assert [s.name for s in inside if s.name != "update_weights"] == parts[name]
    seconds = {span.name: span.end_s - span.start_s for span in spans}
    assert seconds["update_weights"] == pytest.approx(timing["update_weights"])
    assert seconds["generate"] == pytest.approx(timing["generate_sequences"])


@pytest.mark.timeout(120)
def test_a_step_of_one_worker(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    (seen,) = run_ranks(one_step, 1, str(tmp_path))
    assert seen["notes"] == MEMORY_ORDER
    assert_spans(seen["recording"].spans, seen["timing"])
    assert seen["after"] == []
    fetched = seen["fetched"]
    assert sorted(fetched.keys()) == sorted([ROLLOUT, TRAINING]) and fetched[ROLLOUT].shape == seen["is_response"].shape
    is_response = seen["is_response"]
    assert torch.allclose(fetched[ROLLOUT][is_response], fetched[TRAINING][is_response], atol=1e-3)
    remote = ["input_ids", "attention_mask", "response_mask", "rollout_log_probs"]
    assert seen["validation"] == seen["training"] == ["response_mask", "responses"]
    assert seen["remote"] == remote
    assert seen["returned_bytes"] == 5 + 12 * len(remote) / 8  # of each of 8 response tokens


class WatchedWorker(ActorRolloutRefWorker):
    """Notes what of training is on the device when the reference is built, and when the rollout engine is."""

    def __init__(self, config: PPOTrainerConfig, role: str) -> None:
        super().__init__(config, role)
        self.notes: list[dict[str, int]] = []

    def _build_ref(self, ops: TrainOps) -> MegatronPPOActor:
        self._note()
        return super()._build_ref(ops)

    def new_rollout(self) -> vLLMRollout:
        self._note()
        return super().new_rollout()

    def _note(self) -> None:
        held: dict[str, int] = {}
        for entry in ledger(self.actor_module, self.optimizer):
            if entry.device == ON_DEVICE and entry.num_bytes and entry.what != "buffer":
                held[entry.what] = held.get(entry.what, 0) + entry.num_bytes
        self.notes.append(held)


def what_lies_there(model_dir: str, offload: bool) -> list[set[str]]:
    overrides = [f"{ENGINE}.{part}_offload={offload}" for part in ("param", "optimizer")]
    worker = WatchedWorker(load_config(config_overrides(model_dir, 1) + overrides), "actor_rollout_ref")
    worker.init_model()
    return [set(note) for note in worker.notes]


@pytest.mark.parametrize("offload", [True, False])
def test_what_leaves_for_generation_has_left_when_the_engine_sizes_its_cache(offload: bool, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    (seen,) = run_ranks(what_lies_there, 1, str(tmp_path), offload)
    assert seen == [set() if offload else {"parameter", "exp_avg", "exp_avg_sq"}] * 2  # in float32, no other masters
