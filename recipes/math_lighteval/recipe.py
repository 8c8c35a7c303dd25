"""MATH-lighteval as a recipe: Pai-Megatron-Patch's GRPO run of DeepSeek-V3 and Moonlight."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from recipes.common import arithmetic
from recipes.common.corpus import CorpusStyle
from recipes.common.launcher.job import Job
from recipes.common.launcher.stages import Stage, module_stage, problems_stage
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


def input_problems(input_dir: Path) -> list[str]:
    """Faults of INPUT_DIR that are visible without reading its rows."""
    try:
        input_files(input_dir)
    except ValueError as error:
        return [str(error).replace("--input_dir", "INPUT_DIR", 1)]
    return []


def data_stages(job: Job) -> list[Stage]:
    """A generated arithmetic set unless INPUT_DIR is given; then parquet files."""
    settings, out = job.settings, []
    input_dir = settings.input_path or settings.data_dir / "arithmetic"
    if settings.input_path is None:
        out.append(problems_stage(job, "recipes.math_lighteval.arithmetic", input_dir))
    arguments = ("--input_dir", input_dir, "--local_dir", settings.data_dir)
    return [*out, module_stage(job, "data", "Data", "recipes.math_lighteval.math_lighteval", *arguments)]


RECIPE = Recipe(
    name="math_lighteval",
    title="GRPO on MATH-lighteval",
    script="run_mcore_deepseek_verl.sh",
    tiny_config="math_lighteval_tiny",
    full_config="deepseek_v3_671b_128gpu",
    accelerators=("cuda",),
    reward="reward.py",
    corpus=CORPUS,
    input_variable="INPUT_DIR",
    input_default="a generated arithmetic set",
    input_meaning="folder of MATH-lighteval: train and test files, parquet or JSON lines",
    input_problems=input_problems,
    data_stages=data_stages,
    shards="torch_dist",
    converts_back=True,
)
