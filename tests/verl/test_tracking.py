"""What a run writes: metrics once per step across restarts, checkpoints that are whole, seeds that never change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import verify_checkpoint
from megatron.core.dist_checkpointing.manifest import Manifest, record_file, write_manifest
from megatron.core.parallel_layout import ParallelLayout
from verl.protocol import DataProto
from verl.trainer.ppo import checkpointing
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_validation_metrics,
)
from verl.trainer.ppo.schedules.generation import sampling_seeds
from verl.utils.metrics_file import console_line
from verl.utils.partitions import get_seqlen_balanced_partitions
from verl.utils.tracking import Tracking


def _steps(root: Path) -> list[tuple[int, float]]:
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["critic/score/mean"]) for record in map(json.loads, lines)]


def test_a_resumed_run_has_every_step_exactly_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Tracking("digits", "run", ["tensorboard"], directory=str(tmp_path), first_step=0)
    for step in range(6):
        first.log({"critic/score/mean": 0.1 * step}, step)
    first.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "critic/sc')  # killed while writing
    again = Tracking("digits", "run", ["tensorboard"], directory=str(tmp_path), first_step=4)
    for step in range(4, 8):
        again.log({"critic/score/mean": 1.0 * step}, step)
    again.finish()
    assert _steps(tmp_path) == [(s, pytest.approx(0.1 * s)) for s in range(4)] + [(s, 1.0 * s) for s in range(4, 8)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("critic/score/mean")}
    assert sorted(shown) == list(range(8))
    assert shown[5] == pytest.approx(5.0)


def test_a_fresh_start_leaves_nothing_of_an_older_run(tmp_path: Path) -> None:
    for _ in range(2):
        tracking = Tracking("digits", "run", [], directory=str(tmp_path), first_step=0)
        tracking.log({"critic/score/mean": 1.0}, 0)
        tracking.finish()
    assert _steps(tmp_path) == [(0, 1.0)]


def test_console_line_shows_what_a_person_watches() -> None:
    line = console_line({"critic/score/mean": 0.5, "timing_s/gen": 1.25, "timing_s/step": 3.0, "other": 1.0}, 7)
    assert line.startswith("step 7 | score 0.500")
    assert "gen 1.2" in line and "step 3.0" in line
    assert "other" not in line and "\n" not in line


def _checkpoint(root: Path, step: int, *, is_whole: bool) -> checkpointing.Checkpoint:
    checkpoint = checkpointing.checkpoint_at(str(root), step)
    checkpoint.write_state({"loader": {"epoch": 0}, "kl_coef": 0.0})
    checkpoint.actor.mkdir()
    (checkpoint.actor / "part.bin").write_bytes(b"12345")
    if is_whole:
        record = record_file(checkpoint.actor / "part.bin")
        write_manifest(checkpoint.actor, Manifest(layout=ParallelLayout(), files={"part.bin": record}))
    return checkpoint


def test_the_newest_complete_checkpoint_is_found_and_older_ones_go(tmp_path: Path) -> None:
    kept = [_checkpoint(tmp_path, step, is_whole=True) for step in (2, 4, 10)]
    for step in (6, 12):
        _checkpoint(tmp_path, step, is_whole=False)
    assert checkpointing.find_latest_ckpt_path(str(tmp_path)) == kept[-1]
    checkpointing.publish(str(tmp_path), kept[-1], max_to_keep=2)
    assert (tmp_path / checkpointing.LATEST).read_text() == "10"
    assert [checkpoint.step for checkpoint in checkpointing.checkpoints(str(tmp_path))] == [4, 10, 12]
    (kept[-1].actor / "part.bin").write_bytes(b"1")  # truncated later
    assert checkpointing.find_latest_ckpt_path(str(tmp_path)) == kept[1]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (2, 4):
        _checkpoint(tmp_path, step, is_whole=True)
    (tmp_path / "global_step_4" / "actor" / "part.bin").write_bytes(b"12346")  # as many bytes, others
    found = checkpointing.find_latest_ckpt_path(str(tmp_path), lambda each: verify_checkpoint(each.actor))
    assert found is not None and found.step == 2


def test_seeds_depend_on_the_sample_alone() -> None:
    whole = sampling_seeds(7, stream=3, first_row=0, num_rows=8)
    assert np.array_equal(whole[5:], sampling_seeds(7, stream=3, first_row=5, num_rows=3))
    others = [sampling_seeds(7, 4, 0, 8), sampling_seeds(8, 3, 0, 8), sampling_seeds(7, -1, 0, 8)]
    everything = np.concatenate([whole, *others])
    assert len(set(everything)) == len(everything)
    assert all(0 <= seed < 2**63 for seed in everything)


def _batch() -> DataProto:
    response_mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5]])
    advantages = torch.tensor([[1.0, 1.0, 9.0], [-1.0, -1.0, -1.0]])
    return DataProto.from_dict(
        {
            "responses": torch.zeros(2, 3, dtype=torch.long),
            "response_mask": response_mask,
            "num_tokens": torch.tensor([1, 2]) + response_mask.sum(-1),
            "token_level_scores": rewards,
            "token_level_rewards": rewards,
            "advantages": advantages,
            "returns": advantages,
        }
    )


def test_batch_metrics_carry_verls_names() -> None:
    metrics = compute_data_metrics(_batch())
    expected = {
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/rewards/min": 0.5,
        "critic/advantages/max": 1.0,
        "response_length/mean": 2.5,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    timing = compute_timing_metrics(_batch(), {"gen": 1.0, "update_actor": 2.0, "step": 4.0})
    assert timing["timing_per_token_ms/gen"] == pytest.approx(1000 / 5)
    assert timing["timing_per_token_ms/update_actor"] == pytest.approx(2000 / 8)
    assert compute_throughout_metrics(_batch(), {"step": 4.0}, n_gpus=2)["perf/throughput"] == 1.0


def test_validation_metrics_are_split_by_source() -> None:
    sources = np.array(["a", "b", "a"], dtype=object)
    parts = {"score": np.array([1.0, 0.0, 0.5]), "accuracy": np.array([1.0, 0.0, 0.0])}
    metrics = compute_validation_metrics(sources, parts, torch.tensor([1, 2, 3]), n=1)
    assert metrics["val/score"] == pytest.approx(0.5)
    assert metrics["val-core/a/reward/mean@1"] == pytest.approx(0.75)
    assert metrics["val-core/b/acc/mean@1"] == 0.0


def test_partitions_are_balanced_complete_and_deterministic() -> None:
    lengths = torch.randint(1, 1000, (48,), generator=torch.Generator().manual_seed(3)).tolist()
    for equal_size in (True, False):
        partitions = get_seqlen_balanced_partitions(lengths, 4, equal_size)
        assert sorted(row for rows in partitions for row in rows) == list(range(48))
        sums = [sum(lengths[row] for row in rows) for rows in partitions]
        assert max(sums) - min(sums) < 0.1 * sum(sums) / 4
        assert not equal_size or {len(rows) for rows in partitions} == {12}
        assert partitions == get_seqlen_balanced_partitions(lengths, 4, equal_size)
    assert get_seqlen_balanced_partitions([5, 0, 0], 3, equal_size=False).count([]) == 0
    with pytest.raises(ValueError, match="do not divide"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
