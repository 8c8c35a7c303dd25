"""A recipe as one object: its configs, data stages and reward; it is found by the name of its folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from recipes.common.tiny_models import DEEPSEEK_V3, TinyModel

if TYPE_CHECKING:
    from recipes.common.corpus import CorpusStyle

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"


@dataclass(frozen=True)
class RecipeInputs:
    """What a run gives a recipe's functions: where its data goes, the seed, and what the user named, None or "" if not.

    ``max_prompt_length`` is the config's, in tokens; None before the config is resolved. ``own`` are the recipe's own
    variables that are given, by name.
    """

    data_dir: Path
    seed: int
    input_path: Path | None = None
    eval_input: str = ""
    model_path: Path | None = None
    max_prompt_length: int | None = None
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """One folder of ``recipes``; its ``recipe.py`` holds one of these as ``RECIPE``.

    ``input_variable`` is the environment variable that names the data; ``input_default`` and ``input_meaning``
    describe it in --help. ``check_input(path)`` raises ValueError for its faults, before anything starts. Where it
    is not set, ``problems_module`` with ``problems_arguments(inputs)`` generates problems as ``problems_output`` in
    the folder of the data. From either, ``data_module`` with ``data_arguments(inputs, path)`` makes
    ``data/train.parquet`` and ``data/test.parquet``. ``accelerators`` are the devices on which ``full_config`` is
    the default. A recipe with ``cpu_config`` takes any model, also by its name on a hub: without MODEL_PATH it is
    ``tiny_config`` everywhere, with it ``cpu_config`` on a CPU; its data is then ``hub_input``, a name of
    tools.download and the folder in what arrives, unless the user names other. ``eval_variable`` names the
    evaluation sets of a recipe that has several, ``name path name path ...``; ``eval_problems`` returns its faults,
    ``eval_sets`` the names of the files that the data stages write to data/eval. ``shards`` is the form of the
    weights that training starts from; with ``converts_back`` the last checkpoint is
    converted to an HF directory. ``tiny_model`` is what it starts from where no model is given, after a warm-up on its
    corpus.

    ``own_variables`` are further variables of this recipe, name -> default as shown and meaning; ``own_problems``
    returns their faults, and ``own_overrides`` the keys of the config that follow from them. ``needs_input`` is False
    where the data script needs neither the input nor generated problems. ``small_variables`` are what a small model on
    a CPU starts with, in ``small_config`` where no input is needed.
    """

    name: str
    title: str
    script: str
    tiny_config: str
    full_config: str
    accelerators: tuple[str, ...]
    reward: str
    corpus: CorpusStyle
    input_variable: str
    input_default: str
    input_meaning: str
    check_input: Callable[[Path], object]
    problems_module: str
    problems_output: str
    data_module: str
    data_arguments: Callable[[RecipeInputs, Path], Sequence[object]]
    problems_arguments: Callable[[RecipeInputs], Sequence[object]] = lambda inputs: ()
    shards: Literal["mp_rank", "torch_dist"] = "mp_rank"
    converts_back: bool = False
    tiny_model: TinyModel = DEEPSEEK_V3
    cpu_config: str | None = None
    hub_input: tuple[str, str] | None = None
    eval_variable: str | None = None
    eval_default: str = ""
    eval_problems: Callable[[str], list[str]] = lambda text: []
    eval_sets: Callable[[RecipeInputs], tuple[str, ...]] = lambda inputs: ()
    own_variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    own_problems: Callable[[RecipeInputs], list[str]] = lambda inputs: []
    own_overrides: Callable[[RecipeInputs], Mapping[str, object]] = lambda inputs: {}
    needs_input: Callable[[RecipeInputs], bool] = lambda inputs: True
    small_config: str | None = None
    small_variables: Callable[[RecipeInputs], Mapping[str, str]] = lambda inputs: {}

    def default_config(self, accelerator: str, has_model: bool) -> str:
        """The config where the user names none, on this machine with or without MODEL_PATH."""
        if self.cpu_config is not None and not has_model:
            return self.tiny_config
        if accelerator in self.accelerators:
            return self.full_config
        return self.cpu_config or self.tiny_config

    @property
    def config_dir(self) -> Path:
        return RECIPES / self.name / "config"

    @property
    def reward_path(self) -> Path:
        """The file with its ``compute_score``."""
        return RECIPES / self.name / self.reward

    @property
    def start_command(self) -> str:
        """The command that starts it, from the root of the repository."""
        return f"bash recipes/{self.name}/{self.script}"


def recipe_names() -> list[str]:
    """The names of all recipes: the folders that have a ``recipe.py``, except this one."""
    return sorted(path.parent.name for path in RECIPES.glob("*/recipe.py") if path != Path(__file__).resolve())


def load_recipe(name: str) -> Recipe:
    """The recipe of that name; ValueError that lists the known names."""
    if name not in recipe_names():
        raise ValueError(f"there is no recipe {name!r}; expected one of {', '.join(recipe_names())}")
    recipe: Recipe = importlib.import_module(f"recipes.{name}.recipe").RECIPE
    return recipe
