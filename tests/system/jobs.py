"""The small training jobs that the system tests run, one of each recipe: their inputs, commands, results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.common.arithmetic import make_set
from recipes.common.base_model import make_base_model
from recipes.common.corpus import CorpusStyle
from recipes.common.recipe import load_recipe
from recipes.math_lighteval import arithmetic as math_lighteval_arithmetic
from recipes.math_lighteval import recipe as math_lighteval
from recipes.math_lighteval.math_lighteval import convert as convert_problems
from recipes.r1_dynamic_sampling import arithmetic as dynamic_sampling_arithmetic
from recipes.r1_dynamic_sampling import recipe as r1_dynamic_sampling
from recipes.r1_dynamic_sampling.prompt_data import convert as convert_prompts
from recipes.r1_zero import recipe as r1_zero
from recipes.r1_zero.json_to_parquet import main as json_to_parquet
from tests.system.command import Command, newest_step, read_metrics, without_measurements

STEPS = 4
# Steps that take about a second: the order of things and their results matter here, not what is learned.
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=32",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.rollout.num_gpu_blocks_override=512",
    "data.val_max_samples=16",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
    "trainer.timeline_freq=2",
    "trainer.log_samples_freq=2",
    "trainer.log_samples_rows=10",
    "reward_model.timeout_s=120",  # an answer that a busy machine leaves ungraded is another result
)


@dataclass(frozen=True)
class Prepared:
    """What jobs start from, made by the functions behind the launcher's own stages.

    Attributes:
        folder: has ``data/train.parquet`` and ``model``, the base model in its published form.
        inputs: the recipe's variables that name what it reads.
        arguments: of every run, beside ``SMALL``.
    """

    folder: Path
    inputs: Mapping[str, str | Path]
    recipe: str = "r1_zero"
    arguments: tuple[str, ...] = SMALL

    @property
    def model_path(self) -> Path:
        """The base model that runs start from."""
        return Path(self.inputs.get("MODEL_PATH", self.folder / "model"))

    def environment(self, output_dir: Path, **more: object) -> dict[str, object]:
        """The variables of a run on these inputs."""
        return {**self.inputs, "MODEL_PATH": self.model_path, "OUTPUT_DIR": output_dir, "SEED": 42, **more}

    def make_model(self, corpus: CorpusStyle) -> Prepared:
        """Writes the base model, with very few warm-up steps, and returns self."""
        train = self.folder / "data" / "train.parquet"
        steps, tiny = {"num_steps": 12, "batch_size": 32, "num_processes": 1}, load_recipe(self.recipe).tiny_model
        make_base_model(corpus, train, self.model_path, seed=42, **steps, tiny=tiny)
        return self


def prepare(folder: Path) -> Prepared:
    """Of recipes/r1_zero: problems as JSON."""
    json_path = folder / "arithmetic.json"
    json_path.write_text(json.dumps(make_set(num_problems=240)))
    assert json_to_parquet(["--json_path", str(json_path), "--output_dir", str(folder / "data")]) == 0
    return Prepared(folder, {"JSON_PATH": json_path}).make_model(r1_zero.CORPUS)


def prepare_math_lighteval(folder: Path) -> Prepared:
    """Of recipes/math_lighteval: a folder of problems."""
    problems = folder / "problems"
    math_lighteval_arithmetic.write_set(problems, 240, seed=3)
    assert convert_problems(problems, folder / "data") == {"train": 216, "test": 24}
    return Prepared(folder, {"INPUT_DIR": problems}, "math_lighteval").make_model(math_lighteval.CORPUS)


FILTER = '''"""A filter of the user's own."""


def no_group_that_is_all_right(config, group):
    return bool(group.parts["accuracy"].min() < 1)
'''


def prepare_r1_dynamic_sampling(folder: Path) -> Prepared:
    """Of recipes/r1_dynamic_sampling: JSON lines, sets by name, filter by path, two updates a step, two FP8 engines."""
    dynamic_sampling_arithmetic.write_set(folder / "problems", 240, seed=3)
    prompts = folder / "problems" / "prompts.jsonl"
    sets = {name: folder / "problems" / f"{name}.jsonl" for name in ("sums", "comparisons")}
    assert convert_prompts(prompts, sets, folder / "data", "prompt", "label", 256) is not None
    (folder / "filters.py").write_text(FILTER)
    more = (
        "data.gen_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        # Each of the two processes is an engine of its own and holds all experts.
        "actor_rollout_ref.rollout.data_parallel_size=1",
        "actor_rollout_ref.rollout.quantization=fp8",
        f"algorithm.filter_groups.filter_path={folder / 'filters.py'}:no_group_that_is_all_right",
    )
    evaluated = " ".join(f"{name} {path}" for name, path in sets.items())
    inputs = {"PROMPT_DATA": prompts, "EVAL_PROMPT_DATA": evaluated}
    made = Prepared(folder, inputs, "r1_dynamic_sampling", (*SMALL, *more))
    return made.make_model(r1_dynamic_sampling.CORPUS)


PREPARE: dict[str, Callable[[Path], Prepared]] = {
    "r1_zero": prepare,
    "math_lighteval": prepare_math_lighteval,
    "r1_dynamic_sampling": prepare_r1_dynamic_sampling,
}


@dataclass(frozen=True)
class Job:
    """A user's run of the small job in a folder, with ``overrides`` and ``variables`` of its own.

    ``plan``: whether it begins with the plan of the whole run.
    """

    prepared: Prepared
    folder: Path
    steps: int = STEPS
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    plan: bool = False

    @property
    def output_dir(self) -> Path:
        """Where its run lies."""
        return self.folder / "run"

    @property
    def newest_step(self) -> int:
        """The step that ``latest`` names; 0 when there is no checkpoint yet."""
        return newest_step(self.output_dir)

    def command(self, name: str, *more: str) -> Command:
        """Start it, or start it again, with ``more`` arguments; its output goes to ``<name>.log``."""
        environment = self.prepared.environment(self.output_dir, STEPS=self.steps, **self.variables)
        arguments = (*self.prepared.arguments, *self.overrides, *more, *([] if self.plan else ["--no-plan"]))
        return Command(self.folder / f"{name}.log", environment, arguments, recipe=self.prepared.recipe)

    def finish(self) -> None:
        """Run it to its end, which must be a good one."""
        with self.command("finish") as command:
            assert command.wait() == 0, command.tail()
            assert command.left_behind() == []

    def weights(self) -> dict[str, bytes]:
        """The files of the trained model in Hugging Face form, by name, exported or converted back."""
        folders = (self.output_dir / "export_hf", self.output_dir / "trained_hf" / f"global_step_{self.steps}")
        files = [path for folder in folders for path in sorted(folder.glob("*.*"))]
        return {path.name: path.read_bytes() for path in files if path.name != "manifest.json"}  # it has paths

    def ledger(self) -> dict[str, list[dict[str, Any]]]:
        """Every grade of every step and validation, by file, without clocks."""
        return {
            path.name: [
                {name: value for name, value in json.loads(line).items() if name != "seconds"}
                for line in path.read_text(encoding="utf-8").splitlines()
            ]
            for path in sorted((self.output_dir / "reward_ledger").iterdir())
        }

    def sample_records(self) -> dict[str, bytes]:
        """The files of recorded samples, by name, without what their turns took in seconds."""
        files = sorted((self.output_dir / "samples").glob("*"))
        return {path.name: re.sub(rb', "seconds": {[^}]*}', b"", path.read_bytes()) for path in files}


def assert_same_result(job: Job, reference: Job) -> None:
    """Every step once, metrics and grades equal but for measurements, sample records and exported weights bit-equal."""
    mine, expected = read_metrics(job.output_dir), read_metrics(reference.output_dir)
    assert [step["step"] for step in mine] == [*range(job.steps + 1)]
    assert without_measurements(mine) == without_measurements(expected)
    assert job.weights() == reference.weights()
    assert job.ledger() == reference.ledger()
    assert {f"step_{step}.jsonl" for step in range(1, job.steps + 1)} <= job.ledger().keys()
    assert job.sample_records() == reference.sample_records() and len(job.sample_records()) == job.steps // 2
    assert any(name.endswith(".safetensors") for name in job.weights())
