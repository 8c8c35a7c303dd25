"""What a small model on a CPU starts with, where the recipe has that and the user says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hf_formats.config import load_hf_config
from tools.launch.accelerators import CPU
from tools.launch.settings import Settings
from tools.plan.model_work import model_work

SMALL = 1e9  # parameters; a model with fewer is small


def with_small_model(settings: Settings, environment: Mapping[str, str]) -> tuple[Settings, str | None]:
    """The settings with the recipe's defaults for a small model, and the line that says so; as they are for any other.

    A config or training files that the user names are for what the user wants, so nothing is changed beside them. The
    parameters are counted by the model's config; no weights are read.
    """
    recipe, named = settings.recipe, environment.get("CONFIG_NAME")
    own_files = any(text.lstrip("+").startswith("data.train_files=") for text in settings.overrides)
    is_asked = recipe.small_config is not None and named in (None, "", recipe.small_config)
    if settings.model_path is None or settings.accelerator != CPU or own_files or not is_asked:
        return settings, None
    try:
        count = model_work(load_hf_config(settings.model_path)).parameters
    except (ValueError, OSError):
        return settings, None  # the checks report what is wrong with it
    if count >= SMALL:
        return settings, None
    defaults = dict(recipe.small_variables(settings.recipe_inputs))
    settings = replace(settings, own={**defaults, **settings.own})
    if recipe.small_config is not None and not recipe.needs_input(settings.recipe_inputs):
        settings = replace(settings, config_name=recipe.small_config)
    chosen = {"CONFIG_NAME": settings.config_name, **settings.own}
    shown = " ".join(f"{name}={value}" for name, value in chosen.items() if not environment.get(name, "").strip())
    line = f"the model has {count / 1e6:.0f} million parameters, so this is a small model's run: {shown}"
    return settings, f"{line}; what you set of these goes before" if shown else None
