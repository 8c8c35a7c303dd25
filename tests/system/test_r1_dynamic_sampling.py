"""The whole job of recipes/r1_dynamic_sampling, small: sets by name, filter by path, two updates, two FP8 engines."""

from __future__ import annotations

from pathlib import Path

from recipes.common.base_model import make_base_model
from recipes.r1_dynamic_sampling.arithmetic import write_set
from recipes.r1_dynamic_sampling.prompt_data import convert
from recipes.r1_dynamic_sampling.recipe import CORPUS
from tests.pages import undocumented
from tests.system.command import Command, read_metrics
from tests.system.jobs import SMALL

STEPS = 2
FILTER = '''"""A filter of the user's own."""


def no_group_that_is_all_right(config, group):
    return bool(group.parts["accuracy"].min() < 1)
'''
MORE = (
    "data.gen_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    # Each of the two processes is an engine of its own and holds all experts.
    "actor_rollout_ref.rollout.data_parallel_size=1",
    "actor_rollout_ref.rollout.quantization=fp8",
)


def test_from_json_lines_to_a_policy(tmp_path: Path) -> None:
    write_set(tmp_path / "problems", 240, seed=3)
    prompts = tmp_path / "problems" / "prompts.jsonl"
    sets = {name: tmp_path / "problems" / f"{name}.jsonl" for name in ("sums", "comparisons")}
    assert convert(prompts, sets, tmp_path / "data", "prompt", "label", 256) is not None
    model, run = tmp_path / "model", tmp_path / "run"
    make_base_model(
        CORPUS, tmp_path / "data" / "train.parquet", model, seed=3, num_steps=12, batch_size=32, num_processes=1
    )
    (tmp_path / "filters.py").write_text(FILTER)
    environment = {
        "PROMPT_DATA": prompts,
        "EVAL_PROMPT_DATA": " ".join(f"{name} {path}" for name, path in sets.items()),
        "MODEL_PATH": model,
        "OUTPUT_DIR": run,
        "STEPS": STEPS,
    }
    filter_path = f"algorithm.filter_groups.filter_path={tmp_path / 'filters.py'}:no_group_that_is_all_right"
    arguments = (*SMALL, *MORE, filter_path)
    with Command(tmp_path / "run.log", environment, arguments, recipe="r1_dynamic_sampling") as command:
        assert command.wait() == 0, command.tail()
        assert command.left_behind() == []
    steps = read_metrics(run)
    assert undocumented(name for step in steps for name in step) == []
    assert [step["step"] for step in steps] == [*range(STEPS + 1)]
    for step in steps[1:]:
        assert step["train/num_gen_batches"] == 1 and step["train/dropped_surplus_groups"] > 0
        assert step["actor/grad_norm"] >= 0
    assert {"val/score", "val/sums/score", "val/comparisons/response_length"} <= steps[0].keys()
    assert (run / "report.html").is_file()
