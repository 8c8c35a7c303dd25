"""Samples that do not divide over the replicas: a step trains on each of them once, and copies are thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.system.command import read_metrics
from tests.system.in_process import fit, in_process_config
from tests.system.jobs import Prepared

pytestmark = pytest.mark.timeout(600)
ENGINE = "actor_rollout_ref.actor.megatron"
# One replica of the model in training, over two stages, and two in generation: 9 samples over 2.
UNEVEN = (
    f"{ENGINE}.pipeline_model_parallel_size=2",
    f"{ENGINE}.num_layer_list=[2,1]",
    f"{ENGINE}.expert_model_parallel_size=1",
    "data.train_batch_size=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    "actor_rollout_ref.rollout.n=3",
    "trainer.save_rollouts=True",
)


@pytest.mark.slow  # test_config_values.py has the warning, test_protocol.py the padding
def test_a_step_trains_on_every_sample_once(local_ray: None, converted: Prepared, tmp_path: Path) -> None:
    config = in_process_config(converted, tmp_path, 2, 2, *UNEVEN)
    assert config.rollout_replicas == 2 and config.training_layout.data_parallel_size == 1
    fit(config)
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 and row["actor/grad_norm"] > 0 for row in rows)
    for step in (1, 2):
        batch = load_file(tmp_path / "rollouts" / f"step_{step}.safetensors")
        assert {len(column) for column in batch.values()} == {9}
