"""DeepSeek-R1-Zero as a recipe: problems as ``deepscaler.json``, thought and answer in tags, rule rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe, RecipeInputs
from recipes.r1_zero.deepscaler import TAGS
from recipes.r1_zero.json_to_parquet import SYSTEM_TEMPLATE, read_rows


def solution_of(row: dict[str, Any]) -> str:
    """The solution that ``json_to_parquet`` stores beside a problem."""
    solution: str = row["extra_info"]["answer"]
    return solution


CORPUS = CorpusStyle(
    well_formed="<think>{thought}</think><answer>\\boxed{{{answer}}}</answer>",
    broken=(
        "{thought}</think><answer>\\boxed{{{answer}}}</answer>",
        "<think>{thought}<answer>\\boxed{{{answer}}}</answer>",
        "<think>{thought}</think>\\boxed{{{answer}}}",
        "<think>{thought}</think><answer>{answer}</answer>",
        "<think>{thought}</think><answer>\\boxed{{{answer}}}",
        "<answer>\\boxed{{{answer}}}</answer><think>{thought}</think>",
        "<think>{thought}</think><think>{thought}</think><answer>\\boxed{{{answer}}}</answer>",
        "{thought}",
        "\\boxed{{{answer}}}",
    ),
    # The system template is one token too: as text it would be four fifths of all tokens of the tiny run, without any
    # use to a model that has never seen English.
    whole_tokens=(*TAGS, "\\boxed{", SYSTEM_TEMPLATE),
    solution_of=solution_of,
)


def data_arguments(inputs: RecipeInputs, json_path: Path) -> list[object]:
    """The options of ``json_to_parquet``, which drops prompts that are too long where a tokenizer is given."""
    arguments = ["--json_path", json_path, "--output_dir", inputs.data_dir]
    arguments += ["--train_data_ratio", 0.9, "--seed", inputs.seed]
    if inputs.model_path is not None:
        arguments += ["--tokenizer", inputs.model_path, "--max_prompt_length", inputs.max_prompt_length]
    return arguments


RECIPE = Recipe(
    name="r1_zero",
    title="DeepSeek-R1-Zero",
    script="ray_start_grpo_npu.sh",
    tiny_config="r1_zero_tiny",
    full_config="r1_ascend_671b_256die",
    accelerators=("npu",),
    reward="deepscaler.py",
    corpus=CORPUS,
    input_variable="JSON_PATH",
    input_default="a generated arithmetic set",
    input_meaning="problems as deepscaler.json: a list of problem, answer, solution",
    check_input=read_rows,
    problems_module="recipes.common.arithmetic",
    problems_output="arithmetic.json",
    data_module="recipes.r1_zero.json_to_parquet",
    data_arguments=data_arguments,
)
