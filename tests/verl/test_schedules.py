"""The schedules on a real Ray with one rank that trains and one that generates: ages, versions, no sample lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.pages import undocumented
from tests.system.command import without_measurements
from tests.system.test_restart_of_ranks import mortal_worker
from tests.verl.bandit import bandit_config, run_trainer, write_inputs
from verl.trainer.config import PPOTrainerConfig, validate_config
from verl.trainer.main_ppo import worker_classes
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.recovery import fit_with_restarts
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import NaiveRewardManager

PROMPTS, SAMPLES = 4, 2
MODEL = (
    "data.max_response_length=12",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.max_num_seqs=6",
    "actor_rollout_ref.rollout.num_gpu_blocks_override=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "data.val_max_samples=4",
    "trainer.val_before_train=False",
    "trainer.log_samples_freq=1",
    "trainer.export_hf=False",
    "trainer.total_epochs=9",
)
SEPARATE = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=1", "rollout.n_gpus_per_node=1")
ASYNC = (*SEPARATE, "trainer.schedule=fully_async", "async_training.steps_per_call=3")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_inputs(tmp_path)
    write_tiny_checkpoint(tmp_path / "model", tiny_hf_config(vocab_size=300), seed=1, dtype=torch.float32)
    return tmp_path


def config_of(root: Path, steps: int, *overrides: str) -> PPOTrainerConfig:
    length = (f"trainer.total_training_steps={steps}", "trainer.save_freq=2", "trainer.test_freq=2")
    config = bandit_config(root, *MODEL, *length, *overrides)
    assert validate_config(config) == []
    return config


def train(root: Path, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """Trains to ``steps``, on from where an earlier call was; the metrics of all steps."""
    config = config_of(root, steps, *overrides)
    run_trainer(config, *worker_classes(config))
    return metrics_of(root, steps)


def metrics_of(root: Path, steps: int) -> list[dict[str, Any]]:
    """Of all steps; asserts that each is there once."""
    metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert undocumented(name for record in metrics for name in record) == []
    assert [record["step"] for record in metrics] == list(range(1, steps + 1))
    return metrics


def versions_of(root: Path, steps: int) -> list[list[Any]]:
    """Per step the versions of its samples; asserts that no prompt was trained on twice and none in part."""
    groups: Counter[str] = Counter()
    found = []
    for step in range(1, steps + 1):
        rows = [json.loads(line) for line in (root / "samples" / f"step_{step}.jsonl").read_text().splitlines()]
        assert len(rows) == PROMPTS * SAMPLES
        groups.update(row["uid"] for row in rows)
        for row in rows:
            assert sum(count for _, count in row["versions"]) == row["length"] == len(row["rollout_log_probs"])
        found.append([row["versions"] for row in rows])
    assert len(groups) == steps * PROMPTS and set(groups.values()) == {SAMPLES}
    return found


@pytest.mark.timeout(240)
def test_one_step_off_trains_on_whole_samples_of_the_version_before(local_ray: None, root: Path) -> None:
    metrics = train(root, 3, *SEPARATE, "trainer.schedule=one_step_off")
    assert [record["schedule/staleness/max"] for record in metrics] == [0, 1, 1]
    assert metrics[0]["training/rollout_probs_diff_max"] < 1e-4
    for step, versions in enumerate(versions_of(root, 3), start=1):
        assert {version for spans in versions for version, _ in spans} == {max(0, step - 2)}
        assert all(len(spans) == 1 for spans in versions)


@pytest.mark.timeout(240)
def test_fully_async_carries_partial_samples_over_syncs_and_the_death_of_a_training_rank(
    local_ray: None, root: Path
) -> None:
    """By a clock and not in a fixed order; no sample is lost or trained on twice."""
    settings = (
        *ASYNC,
        "async_training.trigger_parameter_sync_step=2",
        "async_training.staleness_threshold=1.5",
        "algorithm.rollout_correction={rollout_is:token}",
    )
    restarts = train_through_a_death(root, config_of(root, 6, *settings), rank=0, span="update_actor", nth=5)
    assert [(line["step"], line["from_step"]) for line in restarts] == [(5, 4)] and "rank 0" in restarts[0]["cause"]
    assert (root / "checkpoints" / "global_step_4" / "data.npz").is_file()
    metrics = metrics_of(root, 6)
    assert max(record["schedule/staleness/max"] for record in metrics) in (1, 2)
    assert all("rollout_corr/kl" in record for record in metrics)
    versions = versions_of(root, 6)
    drawn = {version for of_step in versions for spans in of_step for version, _ in spans}
    assert drawn <= {0, 2, 4} and len(drawn) > 1  # every second step's weights
    with pytest.raises(ValueError, match=r"actor_rollout_ref.rollout.n is 4 and was 2 when the checkpoint's samples"):
        train(root, 7, *settings, "actor_rollout_ref.rollout.n=4")


@pytest.mark.timeout(240)
def test_two_tensor_parallel_ranks_generate_as_one(local_ray: None, root: Path) -> None:
    two = ("rollout.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    metrics = train(root, 4, *ASYNC, *two, "algorithm.rollout_correction={rollout_is:token}")
    assert metrics[0]["schedule/staleness/max"] == 0 and metrics[0]["training/rollout_probs_diff_max"] < 1e-4
    assert max(record["schedule/staleness/max"] for record in metrics) == 1
    versions = versions_of(root, 4)
    assert {version for of_step in versions for spans in of_step for version, _ in spans} <= {0, 1, 2, 3}
    assert any(len(spans) > 1 for of_step in versions for spans in of_step), "a sync came amid a sample"


def train_through_a_death(root: Path, config: PPOTrainerConfig, rank: int, span: str, nth: int) -> list[dict[str, Any]]:
    """Train with a rank that dies in its nth ``span``; returns the restarts."""
    kills = root / "kills"
    kills.mkdir()
    (kills / f"0.{rank}.{span}.{nth}").write_text("0.02")
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    reward_fn = NaiveRewardManager(tokenizer, config.reward_model, config.custom_reward_function)
    classes = worker_classes(config)
    assert classes[1] is not None
    training, rollout = mortal_worker(classes[0], kills), mortal_worker(classes[1], kills)

    def new_trainer(config: PPOTrainerConfig, metrics: Mapping[str, float]) -> RayPPOTrainer:
        return RayPPOTrainer(config, tokenizer, training, reward_fn, rollout, metrics)

    try:
        fit_with_restarts(config, new_trainer)
    finally:
        reward_fn.close()
    return [json.loads(line) for line in (root / "restarts.jsonl").read_text().splitlines()]


@pytest.mark.slow  # fully_async has a death, with a sync after every second step
@pytest.mark.timeout(240)
def test_a_training_rank_dies_and_no_sample_is_lost_or_trained_on_twice(local_ray: None, root: Path) -> None:
    """In step 3, by a clock and not in a fixed order: the run restarts from step 2 with the prompts started by then."""
    config = config_of(root, 4, *ASYNC, "algorithm.rollout_correction={rollout_is:token}")
    restarts = train_through_a_death(root, config, rank=0, span="update_actor", nth=3)
    assert [(line["step"], line["from_step"]) for line in restarts] == [(3, 2)]
    assert "rank 0" in restarts[0]["cause"]
    metrics = metrics_of(root, 4)
    assert max(record["schedule/staleness/max"] for record in metrics) == 1
    versions_of(root, 4)


@pytest.mark.timeout(240)
def test_a_rollout_rank_dies_in_a_fixed_order_and_no_bit_changes(
    local_ray: None, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It dies in a sync after the first checkpoint: samples and metrics are those of an undisturbed run."""
    whole = tmp_path_factory.mktemp("whole")
    reward = f"custom_reward_function.path={Path(__file__).with_name('rewards_by_length.py')}"
    settings = (
        *ASYNC,
        "async_training.fixed_order=True",
        "async_training.staleness_threshold=2",
        "async_training.keep_kv_cache=True",
        "actor_rollout_ref.rollout.max_num_seqs=5",  # a sample of the third prompt waits: syncs come amid its tokens
        "algorithm.rollout_correction={rollout_is:token}",
        reward,
    )
    model = f"actor_rollout_ref.model.path={root / 'model'}"
    write_inputs(whole)
    expected = train(whole, 4, *settings, model)
    restarts = train_through_a_death(root, config_of(root, 4, *settings), rank=1, span="update_weights", nth=4)
    assert len(restarts) == 1 and restarts[0]["from_step"] == 2 and "rank 1" in restarts[0]["cause"]
    assert without_measurements(metrics_of(root, 4)) == without_measurements(expected)
    for step in range(1, 5):
        name = f"samples/step_{step}.jsonl"
        assert (root / name).read_bytes() == (whole / name).read_bytes(), name
    versions = versions_of(root, 4)
    assert versions == versions_of(whole, 4)
    assert any(len(spans) > 1 for of_step in versions for spans in of_step), "a sync came amid a sample"


@pytest.mark.slow  # the parts of the others in another order
@pytest.mark.timeout(240)
def test_a_synchronous_run_goes_on_asynchronously_and_lets_samples_end_before_a_sync(
    local_ray: None, root: Path
) -> None:
    train(root, 2)
    bypass = "algorithm.rollout_correction={bypass_mode:True}"
    metrics = train(root, 5, *ASYNC, "async_training.partial_rollout=False", bypass)
    assert all(record["schedule/partial_samples"] == 0 for record in metrics[2:])
    versions_of(root, 5)
