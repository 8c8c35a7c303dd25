"""GSM8K as a recipe: the quick start with any model on the devices that are there."""

from __future__ import annotations

from recipes.common import tiny_models
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe
from recipes.gsm8k.gsm8k import FORM, INSTRUCTION, solution_of

CORPUS = CorpusStyle(
    well_formed="{thought}\n#### {answer}",
    broken=("{thought}\n{answer}", "{thought}", "#### {answer}\n{thought}", "The answer is {answer}."),
    whole_tokens=(INSTRUCTION, "####"),
    solution_of=solution_of,
)

RECIPE = Recipe(
    name="gsm8k",
    title="GRPO on GSM8K",
    script="run.sh",
    tiny_config="gsm8k_tiny",
    full_config="gsm8k",
    accelerators=("npu", "cuda"),
    reward="reward.py",
    corpus=CORPUS,
    tiny_model=tiny_models.QWEN3,
    cpu_config="gsm8k_cpu",
    hub_input=("gsm8k", "main"),
    input_variable="INPUT_DIR",
    input_default="generated word problems; with MODEL_PATH GSM8K from its hub",
    input_meaning="folder of GSM8K: train and test files, parquet or JSON lines",
    check_input=FORM.input_files,
    problems_module="recipes.gsm8k.word_problems",
    problems_output="word_problems",
    data_module="recipes.gsm8k.gsm8k",
    data_arguments=lambda inputs, input_dir: ("--input_dir", input_dir, "--local_dir", inputs.data_dir),
)
