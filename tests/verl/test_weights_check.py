"""After a sync the rollout engine's weights are compared with the trainer's by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import ENGINE, config_overrides
from verl.trainer.config import load_config
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.slice_intake import WeightSlice

ROLLOUT = "actor_rollout_ref.rollout"
WRONG = "model.layers.1.mlp.experts.2.down_proj.weight"


class WrongRollout(vLLMRollout):
    """Gets one element of one weight wrong."""

    def update_weight_slices(self, slices: Iterable[WeightSlice], version: int) -> dict[str, WeightDigest]:
        return super().update_weight_slices(
            (_changed(part) if part.hf_name == WRONG else part for part in slices), version
        )


def _changed(part: WeightSlice) -> WeightSlice:
    values = part.values.clone()
    values[3, 5] = -values[3, 5].float()
    return part._replace(values=values)


def sync(model_dir: str, world_size: int, settings: list[str]) -> tuple[int, int, str]:
    """(the engine's policy version and digests after two syncs, the error of a third whose weights are wrong)."""
    overrides = [*config_overrides(model_dir, world_size), *settings]
    worker = ActorRolloutRefWorker(load_config(overrides), "actor_rollout")
    worker.init_model()
    rollout: Any = worker.rollout
    for _ in range(2):
        with worker.sharding_manager:
            version, count = rollout.inference_engine.policy_version, len(rollout.held_digests())
    rollout.__class__ = WrongRollout
    with pytest.raises(RuntimeError) as error, worker.sharding_manager:
        pass
    return version, count, str(error.value)


SETTINGS: dict[str, tuple[int, list[str]]] = {
    "TP2 to DP2 with experts over both, bfloat16": (
        2,
        [f"{ENGINE}.tensor_model_parallel_size=2", f"{ROLLOUT}.dtype=bfloat16"],
    ),
    "DP2 to TP2, FP8": (2, [f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.quantization=fp8"]),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_weight_arrives_and_a_wrong_one_stops_every_rank_by_name(name: str, tmp_path: Path) -> None:
    world_size, settings = SETTINGS[name]
    write_tiny_checkpoint(tmp_path, tiny_hf_config(), seed=1, dtype=torch.float32)
    for version, count, message in run_ranks(sync, world_size, str(tmp_path), world_size, settings):
        assert version == 2 and count > 40
        assert "rollout engine differ" in message and f"  - {WRONG}: " in message
