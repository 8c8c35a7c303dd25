"""A recipe's training, or its whole job, with this process in place of the processes that the launcher would start."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from recipes.common.recipe import load_recipe
from tests.ray_workers import lean_cluster
from tests.system.jobs import SMALL, Prepared
from tests.verl.bandit import run_trainer
from tools.launch import checks
from tools.launch.job import Job, resolve_config
from tools.launch.roles import find_role
from tools.launch.settings import read_settings
from tools.launch.stages import Stage, closing_stages, driver_stage, stages
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.config.override_text import override
from verl.trainer.main_ppo import worker_classes
from verl.utils.net_utils import free_ports

FEW_CPUS = "ray_kwargs.num_cpus_per_worker=0.25"


def in_process_config(prepared: Prepared, folder: Path, num_ranks: int, steps: int, *more: str) -> PPOTrainerConfig:
    """Of recipes/r1_zero, with steps that take seconds, on a Ray that is there; everything is written to ``folder``."""
    recipe, data = load_recipe("r1_zero"), prepared.folder / "data"
    given = (
        override("data.train_files", data / "train.parquet"),
        override("data.val_files", data / "test.parquet"),
        "data.seed=42",
        override("actor_rollout_ref.model.path", prepared.model_path),
        "actor_rollout_ref.rollout.seed=42",
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing=False",
        override("custom_reward_function.path", recipe.reward_path),
        f"trainer.n_gpus_per_node={num_ranks}",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
        override("trainer.default_local_dir", folder / "checkpoints"),
        override("trainer.report_dir", folder),
        FEW_CPUS,
    )
    config = load_config([*SMALL, *given, *more], config_name=recipe.tiny_config, config_dir=recipe.config_dir)
    assert validate_config(config) == []
    return config


def fit(config: PPOTrainerConfig) -> None:
    """Trains as the driver does."""
    run_trainer(config, *worker_classes(config))


def run_stages_here(prepared: Prepared, output: Path, steps: int, *overrides: str) -> None:
    """Do the recipe's whole job: its stages, the driver and the closing stages, each as its command would.

    Ray and its workers are real, but forked. test_killed_whole.py runs the command of every recipe.
    """
    with lean_cluster(num_cpus=2) as address:
        ray_keys = (f"ray_kwargs.ray_init.address={address}", FEW_CPUS)
        job = _run_first_stages(prepared, output, steps, *overrides, *ray_keys)
        _run_here(driver_stage(job))
    for stage in closing_stages(job):
        _run_here(stage)


def convert(prepared: Prepared, output: Path) -> Prepared:
    """``prepared`` with the stages before the training done, for runs that are not about them."""
    settings = _run_first_stages(prepared, output, 1).settings
    files = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    given = (f"{key}={settings.data_dir / name}" for key, name in files.items())
    inputs = {"MODEL_PATH": settings.output_dir / "base_model_bf16", "DIST_CKPT_PATH": settings.dist_ckpt_dir}
    return replace(prepared, inputs=inputs, arguments=(*prepared.arguments, *given))


def _run_first_stages(prepared: Prepared, output: Path, steps: int, *overrides: str) -> Job:
    """Check the job and run its stages up to the training."""
    variables = prepared.environment(output, STEPS=steps, RAY_PORT=free_ports(1)[0])
    given = {name: str(value) for name, value in variables.items()}
    settings = read_settings(load_recipe(prepared.recipe), [*prepared.arguments, *overrides], given)
    job = Job(settings, resolve_config(settings))
    assert checks.problems(job, find_role(settings, job.nnodes)) == []
    for stage in stages(job):
        _run_here(stage)
    return job


def _run_here(stage: Stage) -> None:
    if stage.skip_reason is not None:
        return
    _python, _module_option, name, *arguments = stage.command
    module = import_module(name)
    if hasattr(module, "__path__"):
        module = import_module(f"{name}.__main__")
    assert module.main(arguments) == 0, stage.title
