"""The run to plan: a recipe's config with the given model, nodes and device, and the load of its experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_formats.config import HFModelConfig, load_hf_config
from recipes.common.recipe import RECIPES, load_recipe
from tools.plan.devices import KINDS, DeviceProfile
from verl.trainer.config import PPOTrainerConfig, load_config

MODELS = Path(__file__).with_name("models")
TINY, TINY_DEVICE = "_tiny", "cpu"  # the end of the tiny configs' names, and where they run
MODEL_OF_CONFIG = {
    "671b": "deepseek_v3",
    "moonlight": "moonlight_16b",
    "qwen3_30b": "qwen3_30b_a3b",
    "qwen3_235b": "qwen3_235b_a22b",
}  # part of a config's name -> model
BALANCED, WORST = "balanced", "worst"
EXPERT_LOAD = "actor/expert_load_max"
# A plan needs no checkpoint, and a recipe's config names none until it is launched.
_ENGINES = tuple(f"actor_rollout_ref.{part}.megatron" for part in ("actor", "ref"))
READS_NO_WEIGHTS = tuple(f"{engine}.use_dist_checkpointing=False" for engine in _ENGINES)
# Kernels of DeepEP, in whose place a plan counts the rows of all-to-alls: a token goes to each of its experts.
PLANNED_DISPATCHER = tuple(
    f"++{engine}.override_transformer_config.moe_token_dispatcher_type=alltoall" for engine in _ENGINES
)


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
            model whose name the config's has, or the recipes' tiny one.

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
    models = config.actor_rollout_ref
    engines = (models.actor.megatron, models.ref.megatron)
    if any(x and x.override_transformer_config.get("moe_token_dispatcher_type") == "flex" for x in engines):
        config = load_config([*given, *PLANNED_DISPATCHER], config_name=path.stem, config_dir=path.parent)
    folder = _model_folder(config, path, model)
    worker = config.actor_rollout_ref
    worker = replace(worker, model=replace(worker.model, path=str(folder)))
    config = replace(config, actor_rollout_ref=worker)
    if config.trainer.device == "auto":
        config = replace(config, trainer=replace(config.trainer, device=KINDS[device.family]))
    arguments = {"name": name, "overrides": overrides, "nodes": nodes, "model": model}
    return PlannedRun(path.stem, config, load_hf_config(str(folder)), device, arguments)


def expert_load(text: str, num_ranks: int) -> float:
    """``balanced`` (1), ``worst`` (all to one of ``num_ranks``), a number, or the largest of a run's metrics.jsonl.

    Raises:
        ValueError: it is none of these, less than 1, or the run did not measure it.
    """
    if text in (BALANCED, WORST):
        return 1.0 if text == BALANCED else float(num_ranks)
    try:
        load = float(text)
    except ValueError:
        load = _measured(Path(text))
    if not load >= 1.0:
        raise ValueError(f"--load {load:g}: the fullest rank has at least the mean; 1 is balanced")
    return load


def _measured(path: Path) -> float:
    if not path.is_file():
        raise ValueError(f"--load {path}: neither {BALANCED}, {WORST} nor a number, and there is no such file")
    try:
        steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        loads = [float(step[EXPERT_LOAD]) for step in steps if EXPERT_LOAD in step]
    except (ValueError, TypeError) as error:
        raise ValueError(f"--load {path}: not a run's metrics.jsonl: {error}") from error
    if not loads:
        raise ValueError(f"--load {path}: no step has {EXPERT_LOAD}; a run measures it with expert parallelism")
    return max(loads)


def _model_folder(config: PPOTrainerConfig, config_file: Path, model: str | None) -> Path:
    name, recipe = config_file.stem, config_file.absolute().parents[1]
    here = Path(config.actor_rollout_ref.model.path or "-").expanduser()
    if model is None and (here / "config.json").is_file():
        return here
    if model is not None and (Path(model) / "config.json").is_file():
        return Path(model)
    if model is None and name.endswith(TINY) and recipe.parent == RECIPES:
        return load_recipe(recipe.name).tiny_model.directory
    wanted = model or next((known for mark, known in MODEL_OF_CONFIG.items() if mark in name), "")
    if wanted not in known_models():
        raise ValueError(
            f"no model to plan: actor_rollout_ref.model.path={config.actor_rollout_ref.model.path} has no config.json; "
            f"give --model, one of {', '.join(known_models())} or a folder with a config.json"
        )
    return MODELS / wanted
