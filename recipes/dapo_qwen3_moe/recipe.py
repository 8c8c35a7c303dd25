"""DAPO of Qwen3's MoE models as a recipe: verl's run of Qwen3-30B-A3B on Ascend."""

from __future__ import annotations

from typing import Any

from recipes.common import arithmetic, tiny_models
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe
from recipes.dapo_qwen3_moe.arithmetic import AFTER, BEFORE
from recipes.dapo_qwen3_moe.dapo_math import FORM


def solution_of(row: dict[str, Any]) -> str:
    """The worked solution of a generated row; an empty text for any other."""
    content: str = row["prompt"][0]["content"]
    return arithmetic.solution_of(content.removeprefix(BEFORE).removesuffix(AFTER))


CORPUS = CorpusStyle(
    well_formed="{thought}\nAnswer: {answer}",
    broken=("{thought}\n{answer}", "{thought}", "{thought}\nAnswer {answer}", "The answer is {answer}."),
    whole_tokens=(BEFORE, AFTER, "Answer:"),
    solution_of=solution_of,
)

RECIPE = Recipe(
    name="dapo_qwen3_moe",
    title="DAPO of Qwen3-MoE",
    script="run_dapo_qwen3_moe_30b_megatron_npu.sh",
    tiny_config="dapo_qwen3_moe_tiny",
    full_config="qwen3_30b_a3b_16die",
    accelerators=("npu",),
    reward="reward.py",
    corpus=CORPUS,
    tiny_model=tiny_models.QWEN3_MOE,
    input_variable="INPUT_DIR",
    input_default="a generated arithmetic set",
    input_meaning="folder of dapo-math-17k and aime-2024, or train and test files; parquet or JSON lines",
    check_input=FORM.input_files,
    problems_module="recipes.dapo_qwen3_moe.arithmetic",
    problems_output="arithmetic",
    data_module="recipes.dapo_qwen3_moe.dapo_math",
    data_arguments=lambda inputs, input_dir: ("--input_dir", input_dir, "--local_dir", inputs.data_dir),
    shards="torch_dist",
)
