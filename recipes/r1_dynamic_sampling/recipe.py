"""DeepSeek-R1 with dynamic sampling as a recipe: slime's example on 128 GPUs."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from recipes.common import arithmetic
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe, RecipeInputs
from recipes.r1_dynamic_sampling.arithmetic import EVAL_SETS, INSTRUCTION
from recipes.r1_dynamic_sampling.prompt_data import HELD_OUT_SET, set_pairs

CORPUS = CorpusStyle(
    well_formed="<think>{thought}</think>The answer is \\boxed{{{answer}}}.",
    broken=(
        "<think>{thought}The answer is \\boxed{{{answer}}}.",
        "<think>{thought}</think>The answer is {answer}.",
        "<think>{thought}</think>The answer is \\boxed{{{answer}",
        "<think>The answer is \\boxed{{{answer}}}.</think>{thought}",
        "{thought}",
    ),
    whole_tokens=(INSTRUCTION, "<think>", "</think>", "\\boxed{"),
    solution_of=partial(arithmetic.solution_of_row, instruction=INSTRUCTION),
)


def check_input(prompt_data: Path) -> None:
    """ValueError for faults of PROMPT_DATA that are visible without reading its rows."""
    if not prompt_data.is_file():
        raise ValueError(f"PROMPT_DATA {prompt_data}: no such file; expected JSON lines")


def eval_problems(text: str) -> list[str]:
    """Faults of EVAL_PROMPT_DATA."""
    try:
        sets = set_pairs(shlex.split(text))
    except ValueError as error:
        return [f"EVAL_PROMPT_DATA: {error}"]
    return [f"EVAL_PROMPT_DATA: {name}: {path}: no such file" for name, path in sets.items() if not path.is_file()]


def eval_sets(inputs: RecipeInputs) -> tuple[str, ...]:
    """Names of the sets in ``data/eval``: given, generated, or held out from PROMPT_DATA."""
    if inputs.eval_input:
        return tuple(shlex.split(inputs.eval_input)[::2])
    return EVAL_SETS if inputs.input_path is None else (HELD_OUT_SET,)


def data_arguments(inputs: RecipeInputs, source: Path) -> list[object]:
    """The options of ``prompt_data``; generated problems are a folder with a file of prompts and one of each set."""
    words: list[object] = [*shlex.split(inputs.eval_input)]
    if inputs.input_path is None:
        words = words or [word for name in EVAL_SETS for word in (name, source / f"{name}.jsonl")]
        source = source / "prompts.jsonl"
    arguments: list[object] = ["--prompt_data", source, "--local_dir", inputs.data_dir]
    return [*arguments, "--eval_prompt_data", *words] if words else arguments


RECIPE = Recipe(
    name="r1_dynamic_sampling",
    title="DeepSeek-R1 with dynamic sampling",
    script="run_deepseek_r1.sh",
    tiny_config="r1_dynamic_sampling_tiny",
    full_config="deepseek_r1_671b_128gpu",
    accelerators=("cuda",),
    reward="reward.py",
    corpus=CORPUS,
    input_variable="PROMPT_DATA",
    input_default="a generated arithmetic set",
    input_meaning="JSON lines of prompt and label, as dapo-math-17k.jsonl",
    check_input=check_input,
    problems_module="recipes.r1_dynamic_sampling.arithmetic",
    problems_output="arithmetic",
    data_module="recipes.r1_dynamic_sampling.prompt_data",
    data_arguments=data_arguments,
    shards="torch_dist",
    eval_variable="EVAL_PROMPT_DATA",
    eval_default="generated too, or the last 256 prompts of PROMPT_DATA",
    eval_problems=eval_problems,
    eval_sets=eval_sets,
)
