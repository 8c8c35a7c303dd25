"""MATH-lighteval as a recipe: Pai-Megatron-Patch's GRPO run of DeepSeek-V3 and Moonlight."""

from __future__ import annotations

from functools import partial

from recipes.common import arithmetic
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe
from recipes.math_lighteval.math_lighteval import INSTRUCTION, input_files

CORPUS = CorpusStyle(
    well_formed="{thought}\nThe answer is $\\boxed{{{answer}}}$.",
    broken=(
        "{thought}\nThe answer is {answer}.",
        "{thought}\nThe answer is $\\boxed{answer}$.",
        "{thought}\nThe answer is $\\boxed{{{answer}",
        "{thought}",
        "The answer is {answer}.",
    ),
    whole_tokens=(INSTRUCTION, "\\boxed{"),
    solution_of=partial(arithmetic.solution_of_row, instruction=INSTRUCTION),
)


RECIPE = Recipe(
    name="math_lighteval",
    title="GRPO on MATH-lighteval",
    script="run_mcore_deepseek_verl.sh",
    tiny_config="math_lighteval_tiny",
    full_config="deepseek_v3_671b_128gpu_96gb",
    accelerators=("cuda",),
    reward="reward.py",
    corpus=CORPUS,
    input_variable="INPUT_DIR",
    input_default="a generated arithmetic set",
    input_meaning="folder of MATH-lighteval: train and test files, parquet or JSON lines",
    check_input=input_files,
    problems_module="recipes.math_lighteval.arithmetic",
    problems_output="arithmetic",
    data_module="recipes.math_lighteval.math_lighteval",
    data_arguments=lambda inputs, input_dir: ("--input_dir", input_dir, "--local_dir", inputs.data_dir),
    shards="torch_dist",
    converts_back=True,
)
