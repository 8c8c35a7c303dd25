"""The one small training job that the system tests run: its inputs, its command, its results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from recipes.common.arithmetic import make_set
from recipes.common.base_model import make_base_model
from recipes.r1_zero.json_to_parquet import main as json_to_parquet
from recipes.r1_zero.recipe import CORPUS
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
)


@dataclass(frozen=True)
class Prepared:
    """What jobs start from: problems as JSON, and the base model in its published form (FP8)."""

    json_path: Path
    model_path: Path

    def environment(self, output_dir: Path, **more: object) -> dict[str, object]:
        """The variables of a run on these inputs."""
        given = {"JSON_PATH": self.json_path, "MODEL_PATH": self.model_path, "OUTPUT_DIR": output_dir, "SEED": 42}
        return {**given, **more}


def prepare(folder: Path) -> Prepared:
    """Inputs made by the functions behind the launcher's own stages, with very few warm-up steps."""
    json_path = folder / "arithmetic.json"
    json_path.write_text(json.dumps(make_set(num_problems=240)))
    assert json_to_parquet(["--json_path", str(json_path), "--output_dir", str(folder / "data")]) == 0
    train = folder / "data" / "train.parquet"
    make_base_model(CORPUS, train, folder / "model", seed=42, num_steps=12, batch_size=32, num_processes=1)
    return Prepared(json_path, folder / "model")


@dataclass(frozen=True)
class Job:
    """A run of the small job in a folder, with ``overrides`` behind those of all; runs differ in their folders only."""

    prepared: Prepared
    folder: Path
    steps: int = STEPS
    overrides: tuple[str, ...] = ()

    @property
    def output_dir(self) -> Path:
        """Where its run lies."""
        return self.folder / "run"

    @property
    def newest_step(self) -> int:
        """The step that ``latest`` names; 0 when there is no checkpoint yet."""
        return newest_step(self.output_dir)

    def command(self, name: str) -> Command:
        """Start it, or start it again; what it says goes to ``<name>.log``."""
        environment = self.prepared.environment(self.output_dir, STEPS=self.steps)
        return Command(self.folder / f"{name}.log", environment, (*SMALL, *self.overrides))

    def finish(self) -> None:
        """Run it to its end, which must be a good one."""
        with self.command("finish") as command:
            assert command.wait() == 0, command.tail()
            assert command.left_behind() == []

    def weights(self) -> dict[str, bytes]:
        """The exported files, by name."""
        return {path.name: path.read_bytes() for path in sorted((self.output_dir / "export_hf").glob("*"))}

    def sample_records(self) -> dict[str, bytes]:
        """The files of recorded samples, by name."""
        return {path.name: path.read_bytes() for path in sorted((self.output_dir / "samples").glob("*"))}


def assert_same_result(job: Job, reference: Job) -> None:
    """Every step once, every metric that is no measurement equal, sample records and exported weights bit-equal."""
    mine, expected = read_metrics(job.output_dir), read_metrics(reference.output_dir)
    assert [step["step"] for step in mine] == [*range(job.steps + 1)]
    assert without_measurements(mine) == without_measurements(expected)
    assert job.weights() == reference.weights()
    assert job.sample_records() == reference.sample_records() and len(job.sample_records()) == job.steps // 2
    assert any(name.endswith(".safetensors") for name in job.weights())
