"""After a sync the rollout engine's weights are compared with the trainer's by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_formats.ranges import Ranges
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.parallel.test_grpo_step import ENGINE, config_overrides
from verl.trainer.config import load_config
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm.model_executor.model_loader.shard_writer import ShardWriter

ROLLOUT = "actor_rollout_ref.rollout"
WRONG = "model.layers.1.mlp.experts.2.down_proj.weight"


class WronglyHolding(vLLMRollout):
    """One bit of one weight is wrong in memory."""

    @contextmanager
    def update_weight_shards(self, version: int) -> Iterator[ShardWriter]:
        with super().update_weight_shards(version) as writer:
            yield writer
        if WRONG not in writer.digests:
            return
        memory = self.inference_engine.core.worker.model.weight_views[WRONG].memory
        assert isinstance(memory, Tensor)
        # A view of the same element size, because some backends store matrices transposed.
        bits = memory.view({1: torch.uint8, 2: torch.int16}[memory.element_size()])
        bits[3, 5] ^= 0x40
        writer.digests = self.shard_digests()


class WronglyReceiving(vLLMRollout):
    """The first update that comes from another rank is changed on its way."""

    changed = ""

    @contextmanager
    def update_weight_shards(self, version: int) -> Iterator[ShardWriter]:
        with super().update_weight_shards(version) as writer:
            write = writer.write

            def write_once_changed(name: str, ranges: Ranges, values: Tensor, total: Tensor | None = None) -> None:
                if not self.changed and total is None:
                    self.changed = name
                    values = values.clone(memory_format=torch.contiguous_format)
                    values.view(torch.uint8)[(-1,) * values.dim()] ^= 0x20  # of the highest byte: no rounding hides it
                write(name, ranges, values, total)

            writer.write = write_once_changed  # type: ignore[method-assign]
            yield writer


def sync(model_dir: str, world_size: int, settings: list[str]) -> tuple[int, int, list[str], str]:
    """(the engine's policy version and digests after two syncs, the errors of two more with wrong weights, the name of
    what was wrong in the second of these)."""
    overrides = [*config_overrides(model_dir, world_size), *settings]
    worker = ActorRolloutRefWorker(load_config(overrides), "actor_rollout")
    worker.init_model()
    rollout: Any = worker.rollout
    for _ in range(2):
        with worker.rollout_mode:
            version, count = rollout.inference_engine.policy_version, len(rollout.shard_digests())
    errors = []
    for kind in (WronglyHolding, WronglyReceiving):
        rollout.release()
        rollout.__class__ = kind
        with pytest.raises(RuntimeError) as error, worker.rollout_mode:
            pass
        errors.append(str(error.value))
    return version, count, errors, rollout.changed


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
    of_ranks = run_ranks(sync, world_size, str(tmp_path), world_size, settings)
    for version, count, (held, received), _ in of_ranks:
        assert version == 2 and count > 40
        assert "rollout engine differ" in held and f"  - {WRONG}: " in held
        assert f"  - {of_ranks[0][-1]}: " in received
