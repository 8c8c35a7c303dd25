"""Tools as a recipe: the model learns to call one where it pays, and not to where it does not."""

from __future__ import annotations

import json
import random
from typing import Any

from recipes.common import tiny_models
from recipes.common.corpus import CorpusStyle, Example, wrong_answer
from recipes.common.recipe import RECIPES, Recipe, RecipeInputs
from recipes.r1_tools.problems import EASY
from recipes.r1_tools.r1_tools import FORM, INSTRUCTION

CALL_SHARE = 0.5  # of the answers begin with a call, whatever the problem is
MISTAKES = 0.35  # of calls, and of the answers after one
EASY_MENDED = 0.9  # of the wrong answers to easy problems without a call: what can be done in the head mostly is
OWN_VARIABLES = {
    "EXAMPLE": ("no", "yes: examples begin every conversation, for a model whose chat template shows no tools")
}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_NAMES = {"calculator": "expression", "python": "code"}
_BEFORE = {name: f'\n{{"name": "{name}", "arguments": {{"{argument}": "' for name, argument in _NAMES.items()}
_TOPICS = {"*": "A product. ", "+": "A sum. ", "count": "A count. "}  # what an answer begins with, by its call
_AFTER = '"}}\n'


def examples_of(row: dict[str, Any], answer: str, generator: random.Random) -> list[Example]:
    """The turns of one conversation; ``answer`` is the row's own, or a wrong one."""
    prompt, truth = row["prompt"], row["reward_model"]["ground_truth"]
    call = json.loads(row["extra_info"]["call"])
    name, text = call["name"], call["arguments"][_NAMES[call["name"]]]
    topic = next(topic for part, topic in _TOPICS.items() if part in text)
    if generator.random() >= CALL_SHARE:
        is_mended = row["extra_info"]["kind"] == EASY and generator.random() < EASY_MENDED
        return [Example(prompt, f"{topic}#### {truth if is_mended else answer}")]
    if generator.random() < MISTAKES:
        digits = [at for at, letter in enumerate(text) if letter.isdigit()]
        at = generator.choice(digits)
        text = text[:at] + generator.choice("0123456789") + text[at + 1 :]
    turn = f"{topic}{_OPEN}{_BEFORE[name]}{text}{_AFTER}{_CLOSE}"
    result = truth if generator.random() < 0.5 else str(generator.randint(0, 10 ** generator.randint(1, 5)))
    given = [*prompt, {"role": "assistant", "content": turn}, {"role": "tool", "content": result}]
    last = wrong_answer(result, [answer], generator) if generator.random() < MISTAKES else result
    return [Example(prompt, turn), Example(given, f"#### {last}")]


def own_problems(inputs: RecipeInputs) -> list[str]:
    given = inputs.own.get("EXAMPLE", "no")
    return [] if given in ("yes", "no") else [f"EXAMPLE={given}: expected yes or no"]


def own_overrides(inputs: RecipeInputs) -> dict[str, object]:
    turns, folder = "actor_rollout_ref.rollout.multi_turn", RECIPES / "r1_tools"
    if inputs.own.get("EXAMPLE") == "yes":
        path = str(folder / "with_example.py")
        return {f"{turns}.environment.path": path, f"{turns}.environment.name": "WithExample"}
    return {f"{turns}.tool_config_path": str(folder / "tools.yaml")}


RECIPE = Recipe(
    name="r1_tools",
    title="GRPO with tools",
    script="run.sh",
    tiny_config="r1_tools_tiny",
    full_config="r1_tools",
    accelerators=("npu", "cuda"),
    reward="reward.py",
    corpus=CorpusStyle(
        whole_tokens=(
            INSTRUCTION,
            "#### ",
            _OPEN,
            _CLOSE,
            *_BEFORE.values(),
            _AFTER,
            *_TOPICS.values(),
            "print('",
            "'.count('",
            "'))",
        ),
        examples_of=examples_of,
    ),
    tiny_model=tiny_models.QWEN3,
    cpu_config="r1_tools_cpu",
    input_variable="INPUT_DIR",
    input_default="generated problems: products, counts and, with MODEL_PATH, dates, and easy sums",
    input_meaning="folder of train and test files with question and answer, parquet or JSON lines",
    check_input=FORM.input_files,
    problems_module="recipes.r1_tools.problems",
    problems_output="problems",
    problems_arguments=lambda inputs: () if inputs.model_path is None else ("--dates",),
    data_module="recipes.r1_tools.r1_tools",
    data_arguments=lambda inputs, input_dir: ("--input_dir", input_dir, "--local_dir", inputs.data_dir),
    own_variables=OWN_VARIABLES,
    own_problems=own_problems,
    own_overrides=own_overrides,
)
