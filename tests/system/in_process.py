"""The tiny recipe's training with this process as the driver: what it does can be seen and changed."""

from __future__ import annotations

from pathlib import Path

from recipes.common.recipe import load_recipe
from tests.system.jobs import SMALL, Prepared
from tests.verl.bandit import run_trainer
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.main_ppo import worker_classes


def in_process_config(prepared: Prepared, folder: Path, num_ranks: int, steps: int, *more: str) -> PPOTrainerConfig:
    """Of recipes/r1_zero, with steps that take seconds, on a Ray that is there; everything is written to ``folder``."""
    recipe, data = load_recipe("r1_zero"), prepared.folder / "data"
    given = (
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        "data.seed=42",
        f"actor_rollout_ref.model.path={prepared.model_path}",
        "actor_rollout_ref.rollout.seed=42",
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing=False",
        f"custom_reward_function.path={recipe.reward_path}",
        f"trainer.n_gpus_per_node={num_ranks}",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"trainer.report_dir={folder}",
        "ray_kwargs.num_cpus_per_worker=0.25",
    )
    config = load_config([*SMALL, *given, *more], config_name=recipe.tiny_config, config_dir=recipe.config_dir)
    assert validate_config(config) == []
    return config


def fit(config: PPOTrainerConfig) -> None:
    """Trains as the driver does."""
    run_trainer(config, *worker_classes(config))
