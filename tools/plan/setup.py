"""The run to plan: a recipe's config with the given model, nodes and device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_formats.config import HFModelConfig, load_hf_config
from recipes.common.recipe import RECIPES
from tools.plan.devices import DeviceProfile
from verl.trainer.config import PPOTrainerConfig, load_config

MODELS = Path(__file__).with_name("models")
# A plan needs no checkpoint, and a recipe's config names none until it is launched.
READS_NO_WEIGHTS = tuple(f"actor_rollout_ref.{part}.megatron.use_dist_checkpointing=False" for part in ("actor", "ref"))


@dataclass(frozen=True)
class PlannedRun:
    """A run that can be planned.

    name: the config's name · config: its ``model.path`` has a config.json, and its hang watchdog is off · arguments:
    those of ``planned_run``.
    """

    name: str
    config: PPOTrainerConfig
    hf: HFModelConfig
    device: DeviceProfile
    arguments: dict[str, Any] = field(default_factory=dict)

    def changed(self, overrides: Sequence[str]) -> PlannedRun:
        """The run with further overrides; ValueError as ``planned_run``."""
        given = self.arguments
        return planned_run(**given | {"overrides": (*given["overrides"], *overrides), "device": self.device})


def known_configs() -> dict[str, Path]:
    """Name -> file of the recipes' configs."""
    return {path.stem: path for path in sorted(RECIPES.glob("*/config/*.yaml"))}


def known_models() -> list[str]:
    """Names of the models whose config.json comes with the planner."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def planned_run(
    name: str, overrides: Sequence[str], device: DeviceProfile, *, nodes: int | None, model: str | None
) -> PlannedRun:
    """The config ``name`` of a recipe, or the YAML file at that path, with ``key=value`` overrides.

    Args:
        nodes: number of nodes instead of the config's, each with the device's devices_per_node.
        model: a name of ``known_models()`` or a folder with a config.json; by default ``model.path``, or the known
            model whose name the config's has.

    Raises:
        ValueError: there is no such config or model, or the config has problems; all of them are named.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else known_configs().get(name)
    if path is None or not path.is_file():
        raise ValueError(
            f"there is no config {name!r}; known: {', '.join(known_configs())}; or give a YAML file's path"
        )
    given = list(overrides)
    if nodes is not None:
        given += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={device.devices_per_node}"]
    given += ["trainer.hang_timeout_s=0", *READS_NO_WEIGHTS]
    config = load_config(given, config_name=path.stem, config_dir=path.parent)
    folder = _model_folder(config, path.stem, model)
    worker = config.actor_rollout_ref
    worker = replace(worker, model=replace(worker.model, path=str(folder)))
    config = replace(config, actor_rollout_ref=worker)
    if config.has_rollout_ranks:
        raise ValueError(f"trainer.schedule={config.trainer.schedule}: only schedule=sync can be planned rank by rank")
    arguments = {"name": name, "overrides": overrides, "nodes": nodes, "model": model}
    return PlannedRun(path.stem, config, load_hf_config(str(folder)), device, arguments)


def _model_folder(config: PPOTrainerConfig, name: str, model: str | None) -> Path:
    here = Path(config.actor_rollout_ref.model.path or "-").expanduser()
    if model is None and (here / "config.json").is_file():
        return here
    if model is not None and (Path(model) / "config.json").is_file():
        return Path(model)
    wanted = model or next((known for mark, known in _MARKS.items() if mark in name), "")
    if wanted not in known_models():
        raise ValueError(
            f"no model to plan: actor_rollout_ref.model.path={config.actor_rollout_ref.model.path} has no config.json; "
            f"give --model, one of {', '.join(known_models())} or a folder with a config.json"
        )
    return MODELS / wanted


_MARKS = {"671b": "deepseek_v3", "moonlight": "moonlight_16b"}
