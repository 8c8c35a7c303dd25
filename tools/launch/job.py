"""A run as settings and resolved config: its nodes and devices, its config's overrides, its model's directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_formats.config import read_config_dict
from hf_formats.families.family import common_keys
from tools.launch.settings import RAY_PORT_OF_NODES, Settings
from verl.utils.net_utils import free_ports

if TYPE_CHECKING:
    from verl.trainer.config.config import PPOTrainerConfig

FREE_PORT = "<free port>"  # in a plan, of a port that is chosen when Ray starts


@dataclass(frozen=True)
class Job:
    """A run: its settings, the resolved config, and the number of nodes and devices that follow from both."""

    settings: Settings
    config: PPOTrainerConfig

    @property
    def rollout_nnodes(self) -> int:
        """Number of nodes whose ranks only generate; 0 where the schedule has none."""
        return max(0, self.config.rollout.nnodes) if self.config.has_rollout_ranks else 0

    @property
    def most_nnodes(self) -> int:
        """Number of nodes where each one either trains or generates."""
        return self.config.trainer.nnodes + self.rollout_nnodes

    @property
    def nnodes(self) -> int:
        """Number of nodes: those that train and those that only generate, or NNODES where nodes do both."""
        given = self.settings.nnodes if self.rollout_nnodes else None
        return self.most_nnodes if given is None else given

    @property
    def npus_per_node(self) -> int:
        """Devices, and so worker processes, on each node."""
        trainer, rollout = self.config.trainer, self.config.rollout
        if not self.rollout_nnodes:
            return trainer.n_gpus_per_node
        if self.nnodes < self.most_nnodes:
            return trainer.n_gpus_per_node + rollout.n_gpus_per_node
        return max(trainer.n_gpus_per_node, rollout.n_gpus_per_node)

    @property
    def ray_port(self) -> int | str:
        """RAY_PORT; unless it is named, every node expects RAY_PORT_OF_NODES, and one node alone takes a free one."""
        return self.settings.ray_port or (FREE_PORT if self.nnodes == 1 else RAY_PORT_OF_NODES)

    def with_ray_port(self) -> Job:
        """The job with the port as a setting: where it is to be a free one, one that is free now."""
        port = self.ray_port
        if isinstance(port, str):
            (port,) = free_ports(1, avoid=filter(None, [self.settings.master_port, self.config.trainer.live_report]))
        return replace(self, settings=replace(self.settings, ray_port=port))

    @property
    def needs_weights(self) -> bool:
        """Whether MODEL_PATH's weights are read: not for random ones, nor beside shards that DIST_CKPT_PATH holds."""
        models, shards = self.config.actor_rollout_ref, self.settings.dist_ckpt_path
        are_given = shards is not None and has_shards(shards)
        engines = (models.actor.megatron, models.ref.megatron)
        return any(engine.load_weight and not (engine.use_dist_checkpointing and are_given) for engine in engines)

    @property
    def model_dir(self) -> Path:
        """The HF directory without quantisation: tokenizer, dimensions and, without shards, the weights."""
        return _model_dir(self.settings, self.needs_weights)

    @property
    def overrides(self) -> list[str]:
        """The Hydra overrides that the config was resolved with."""
        return run_overrides(self.settings, self.model_dir, self.rollout_nnodes)

    @property
    def device(self) -> str:
        """npu, cuda or cpu: the config's, or this machine's where the config says auto."""
        asked = self.config.trainer.device
        return asked if asked != "auto" else self.settings.accelerator


def config_path(settings: Settings) -> tuple[Path, str]:
    """Folder and name of the config: CONFIG_NAME is one of the recipe's, or the path of a YAML file."""
    given = Path(settings.config_name)
    if given.suffix == ".yaml" or len(given.parts) > 1:
        path = given.expanduser().absolute()
        return path.parent, path.stem
    return settings.recipe.config_dir, settings.config_name


def run_overrides(settings: Settings, model_dir: Path, rollout_nnodes: int = 0) -> list[str]:
    """Hydra overrides that follow from the settings, then what the planner has chosen, then the user's own, which win.

    model_dir: the model's directory without quantisation. rollout_nnodes: how many of NNODES only generate; where that
    leaves none to train, nodes do both.
    """
    from verl.trainer.config.override_text import override

    data, eval_sets = settings.data_dir, settings.recipe.eval_sets(settings.recipe_inputs)
    val_files: dict[str, object] = {f"data.val_files.{name}": data / "eval" / f"{name}.parquet" for name in eval_sets}
    derived = {
        "data.train_files": data / "train.parquet",
        **(val_files or {"data.val_files": data / "test.parquet"}),
        "data.seed": settings.seed,
        "actor_rollout_ref.model.path": model_dir,
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path": settings.dist_ckpt_dir,
        "actor_rollout_ref.actor.megatron.seed": settings.seed,
        "actor_rollout_ref.rollout.seed": settings.seed,
        "custom_reward_function.path": settings.recipe.reward_path,
        "trainer.default_local_dir": settings.output_dir / "checkpoints",
        "trainer.report_dir": settings.output_dir,
        **settings.recipe.own_overrides(settings.recipe_inputs),
    }
    if settings.steps is not None:
        derived["trainer.total_training_steps"] = settings.steps
    if settings.nnodes is not None and settings.nnodes > rollout_nnodes:
        derived["trainer.nnodes"] = settings.nnodes - rollout_nnodes
    if settings.num_devices is not None:
        derived["trainer.n_gpus_per_node"] = settings.num_devices
    return [*(override(key, value) for key, value in derived.items()), *settings.chosen, *settings.overrides]


def resolve_config(settings: Settings) -> PPOTrainerConfig:
    """The run's config, typed; ConfigError (a ValueError) lists every unknown key and wrong type."""
    from verl.trainer.config import load_config

    directory, name = config_path(settings)
    first = run_overrides(settings, _model_dir(settings, True))
    config = load_config(first, config_name=name, config_dir=directory)
    # What only the resolved config tells: how many nodes only generate, and whether weights are wanted.
    wanted = Job(settings, config).overrides
    return config if wanted == first else load_config(wanted, config_name=name, config_dir=directory)


def keys_without_effect(job: Job) -> str:
    """The block of keys and variables that are set and change nothing, with reasons; empty where there are none."""
    from verl.trainer.config import compose_config, resolve_config, variables_without_effect, without_effect_block

    directory, name = config_path(job.settings)
    composed = compose_config(job.overrides, config_name=name, config_dir=directory)
    return without_effect_block([*resolve_config(composed)[1], *variables_without_effect(os.environ)])


def is_fp8(model_path: Path) -> bool:
    """Whether the weights of an HF directory are quantised, by its config."""
    return "quantization_config" in _hf_config(model_path)


def _model_dir(settings: Settings, needs_weights: bool) -> Path:
    if settings.model_path is None and not settings.recipe.tiny_model.is_fp8:
        return settings.output_dir / "base_model"
    if settings.model_path is None or (is_fp8(settings.model_path) and needs_weights):
        return settings.output_dir / "base_model_bf16"
    return settings.output_dir / "base_model_config" if is_fp8(settings.model_path) else settings.model_path


def model_dimensions(settings: Settings) -> Mapping[str, Any]:
    """The config.json of the model that the run starts from; empty when it cannot be read, which the checks report."""
    return _hf_config(settings.model_path or settings.recipe.tiny_model.directory)


def _hf_config(model_path: Path) -> Mapping[str, Any]:
    try:
        return common_keys(read_config_dict(model_path / "config.json"))
    except ValueError:
        return {}


def has_shards(directory: Path) -> bool:
    """Whether a folder holds rank files in MindSpeed-LLM's layout, or a distributed checkpoint."""
    if not directory.is_dir():
        return False
    return (directory / ".metadata").is_file() or next(directory.glob("**/mp_rank_*"), None) is not None


def latest_step(checkpoint_dir: Path) -> str | None:
    """The step of the newest complete checkpoint; None when there is none."""
    latest = checkpoint_dir / "latest_checkpointed_iteration.txt"
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else None
