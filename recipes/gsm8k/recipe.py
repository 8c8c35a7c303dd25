"""GSM8K as a recipe: the quick start with any model on the devices that are there."""

from __future__ import annotations

from pathlib import Path

from recipes.common import tiny_models
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import Recipe, RecipeInputs
from recipes.gsm8k.degrees import GSM8K, parse_degrees, parse_num_shots, set_name
from recipes.gsm8k.gsm8k import FORM, INSTRUCTION, solution_of

CORPUS = CorpusStyle(
    well_formed="{thought}\n#### {answer}",
    broken=("{thought}\n{answer}", "{thought}", "#### {answer}\n{thought}", "The answer is {answer}."),
    whole_tokens=(INSTRUCTION, "####"),
    solution_of=solution_of,
)

OWN_VARIABLES = {
    "DEGREES": (
        "none; for a small model 1,2, with INPUT_DIR 1,2,3,4",
        "what to learn in turn: 1 one step, 2 two steps, 3 larger numbers, 4 GSM8K itself",
    ),
    "NUM_SHOTS": ("0; for a small model 1", "worked examples from the training set before each question"),
}


def own_problems(inputs: RecipeInputs) -> list[str]:
    """Faults of DEGREES and NUM_SHOTS."""
    found = []
    for name, parse in {"DEGREES": parse_degrees, "NUM_SHOTS": parse_num_shots}.items():
        try:
            parse(inputs.own.get(name, "1"))
        except ValueError as error:
            found.append(f"{name}={error}")
    has_none = inputs.input_path is None and inputs.model_path is None
    if not found and has_none and GSM8K in degrees_of(inputs):
        found.append(f"DEGREES has {GSM8K}, GSM8K itself: set INPUT_DIR, or MODEL_PATH to take it from its hub")
    return found


def num_shots_of(inputs: RecipeInputs) -> int:
    return parse_num_shots(inputs.own.get("NUM_SHOTS", "0"))


def degrees_of(inputs: RecipeInputs) -> tuple[int, ...]:
    """DEGREES; where it is not given GSM8K, or the first degree for the tiny model."""
    if "DEGREES" in inputs.own:
        return parse_degrees(inputs.own["DEGREES"])
    return (1,) if inputs.input_path is None and inputs.model_path is None else (GSM8K,)


def is_plain(inputs: RecipeInputs) -> bool:
    """Whether neither degrees nor examples are asked for."""
    return "DEGREES" not in inputs.own and not num_shots_of(inputs)


def needs_input(inputs: RecipeInputs) -> bool:
    """Whether the data script reads a folder: GSM8K's, or that of the first degree's problems for the tiny model."""
    return is_plain(inputs) or GSM8K in degrees_of(inputs)


def eval_sets(inputs: RecipeInputs) -> tuple[str, ...]:
    """A set for each of several degrees; one degree has ``test.parquet``."""
    degrees = degrees_of(inputs)
    return tuple(map(set_name, degrees)) if len(degrees) > 1 else ()


def own_overrides(inputs: RecipeInputs) -> dict[str, object]:
    """The curriculum, where there is more than one degree."""
    if len(degrees_of(inputs)) < 2:
        return {}
    return {"data.sampler.class_path": "pkg://recipes.gsm8k.curriculum", "data.sampler.class_name": "DegreeCurriculum"}


def data_arguments(inputs: RecipeInputs, input_dir: Path) -> list[object]:
    """The options of the data script; the model's tokenizer measures the prompts with their examples."""
    source = ["--input_dir", input_dir] if needs_input(inputs) else []
    arguments: list[object] = [*source, "--local_dir", inputs.data_dir]
    if is_plain(inputs):
        return arguments
    num_shots = num_shots_of(inputs)
    arguments += ["--degrees", ",".join(map(str, degrees_of(inputs))), "--num_shots", num_shots, "--seed", inputs.seed]
    if num_shots and inputs.model_path is not None:
        arguments += ["--tokenizer", inputs.model_path, "--max_prompt_length", inputs.max_prompt_length]
    return arguments


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
    data_arguments=data_arguments,
    eval_sets=eval_sets,
    own_variables=OWN_VARIABLES,
    own_problems=own_problems,
    own_overrides=own_overrides,
    needs_input=needs_input,
    small_config="gsm8k_small",
    small_variables=lambda inputs: {"DEGREES": "1,2,3,4" if inputs.input_path else "1,2", "NUM_SHOTS": "1"},
)
