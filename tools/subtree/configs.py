"""The keys of an upstream's Hydra configs with their defaults, composed as data: no text in them is resolved."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.config import compose_config
from verl.workers.config.keys import flat

Defaults = Mapping[str, Mapping[str, Any]]  # key -> config -> the key's default in it
_ENGINES = "model_engine"  # the group of verl's training engines, of which a run chooses one


def defaults(folder: Path, patterns: Iterable[str]) -> Defaults:
    """The keys of the main configs of ``folder`` that ``patterns`` name, each with its default by config.

    The first config counts once more for each training engine that it can choose.
    """
    mains = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="configs-") as scratch:  # so that each finds the groups of the others
        for main in mains:
            shutil.copytree(main.parent, scratch, dirs_exist_ok=True)
        names = [main.stem for main in mains]
        for engine in sorted(Path(scratch, _ENGINES).glob("*.yaml")):
            names.append(f"{_ENGINES}_{engine.stem}")
            chosen = f"defaults: [ppo_trainer, {{override {_ENGINES}: {engine.stem}}}, _self_]\n"
            Path(scratch, f"{names[-1]}.yaml").write_text(chosen, encoding="utf-8")
        for name in names:
            tree: Any = OmegaConf.to_container(compose_config(config_name=name, config_dir=scratch), resolve=False)
            for key, value in flat(tree):
                if not key.endswith("_target_"):
                    found.setdefault(key, {})[name] = value
    return found
