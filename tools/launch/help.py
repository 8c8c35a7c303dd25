"""What ``--help`` prints of a recipe; it needs Python's own library alone, because no environment may be there yet."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from recipes.common.recipe import Recipe, load_recipe, recipe_names
from tools.launch.settings import variables


def help_text(arguments: Sequence[str]) -> str:
    """The help of the recipe that ``arguments`` begin with, else which recipes there are; ValueError: there is none."""
    if arguments[0] in ("-h", "--help"):
        return f"usage: python -m tools.launch {'|'.join(recipe_names())} [argument ...]"
    recipe = load_recipe(arguments[0])
    width = max(60, min(120, shutil.get_terminal_size().columns))
    return "\n".join(
        [*_wrapped(_about(recipe), width), "", *_table(recipe, width), "", *_wrapped(_options(recipe), width)]
    )


def _about(recipe: Recipe) -> str:
    return (
        f"usage: {recipe.start_command} [--help] [--print-plan] [--no-plan] [key=value ...]\n\n"
        f"Runs {recipe.title} end to end: Ray, data, base model, conversions, GRPO, report. Finished stages are kept, "
        "and training continues from its last checkpoint. Every key=value is a Hydra override with verl's names, for "
        "example actor_rollout_ref.rollout.n=16."
    )


def _options(recipe: Recipe) -> str:
    options = (
        "--print-plan prints every command, variable and the resolved config of all nodes; nothing starts\n"
        "--no-plan starts at once; without it the head first plans the run (memory, calls, time) and refuses what "
        "cannot fit"
    )
    if recipe.cpu_config is None:
        return options
    return (
        f"{options}\n\nWith MODEL_PATH the planner chooses layout, micro-batches, what moves to host memory and the "
        "rollout's share of the devices; --print-plan says why, OUTPUT_DIR/layout.json keeps the choice, every "
        "key=value goes before it. With --no-plan a kept choice is used, else the config's own layout."
    )


def _wrapped(text: str, width: int) -> list[str]:
    lines = text.split("\n")
    return [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]


def _table(recipe: Recipe, width: int) -> list[str]:
    """The variables: name, default and meaning, each in a column of its own."""
    rows = [("variable", "default", "meaning"), *((name, *both) for name, both in variables(recipe).items())]
    name_width = max(len(name) for name, _, _ in rows)
    default_width = (width - name_width - 4) * 2 // 5
    meaning_width = width - name_width - default_width - 4
    lines = []
    for name, default, meaning in rows:
        defaults, meanings = _wrapped(default, default_width), _wrapped(meaning, meaning_width)
        for i in range(max(len(defaults), len(meanings))):
            cells = [column[i] if i < len(column) else "" for column in ([name], defaults, meanings)]
            lines.append(f"{cells[0]:{name_width}}  {cells[1]:{default_width}}  {cells[2]}".rstrip())
    return lines
