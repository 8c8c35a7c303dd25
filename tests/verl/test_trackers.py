"""Trackers: metrics, config and validation samples arrive in each; a resumed run goes on; a failing one ends nothing.

The tests of a package are skipped where it is absent: pip install wandb mlflow swanlab trackio clearml.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verl.trainer.config import load_config
from verl.utils.trackers import TRACKERS, Tracker, missing_packages
from verl.utils.tracking import Tracking

CONFIG = {"trainer": {"nnodes": 2}, "data": {"train_files": ["a.parquet"]}}
SAMPLES = [("1 + 1 =", "<b>2</b> ✓", 1.0), ("1 + 2 =", "4", 0.0)]
METRICS = {"critic/score/mean": 0.25, "val-core/digits/reward/mean@8": 0.5}


def installed(name: str) -> pytest.MarkDecorator:
    package = TRACKERS[name].package
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs {package}: pip install {package}")


class Recorder:
    """A tracker as a package would be: it keeps what it is given, and can be made to fail."""

    runs: ClassVar[list[Recorder]] = []

    def __init__(self, project_name: str, experiment_name: str, config: Any, **place: Any) -> None:
        if project_name == "secret":
            raise PermissionError("log in first")
        self.config, self.continued = config, place["run_id"]
        self.run_id = place["run_id"] or f"{project_name}-{experiment_name}-{len(self.runs)}"
        self.steps: list[int] = []
        self.ended: bool | None = None
        self.runs.append(self)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if data.get("fails"):
            raise ConnectionError("the server is away")
        self.steps.append(step)

    def finish(self, *, is_done: bool = True) -> None:
        self.ended = is_done


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "runs", [])
    monkeypatch.setitem(TRACKERS, "wandb", Tracker("json", "tests.verl.test_trackers:Recorder"))
    return Recorder


def _tracking(root: Path, *names: str, first_step: int = 0) -> Tracking:
    return Tracking("sums", "first", list(names), CONFIG, directory=str(root), first_step=first_step)


def test_a_resumed_run_goes_on_in_its_trackers_run(tmp_path: Path, recorder: type[Recorder]) -> None:
    first = _tracking(tmp_path, "wandb")
    for step in range(6):
        first.log(METRICS, step)
    first.finish(is_done=False)
    again = _tracking(tmp_path, "wandb", first_step=4)
    for step in range(4, 8):
        again.log(METRICS, step)
    again.finish()
    fresh = _tracking(tmp_path, "wandb")
    fresh.finish()
    fresh.finish(is_done=False)
    one, two, three = Recorder.runs
    assert one.config == CONFIG and one.ended is False and two.ended is True and three.ended is True
    assert (two.run_id, three.continued) == (one.run_id, None) and one.steps + two.steps == list(range(8))


def test_a_tracker_that_fails_ends_nothing(
    tmp_path: Path, recorder: type[Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    ours = _tracking(tmp_path, "wandb")
    for step, fails in enumerate((0, 1, 1, 0)):
        ours.log({"fails": fails}, step)
    ours.finish()
    assert caplog.text.count("wandb: ConnectionError: the server is away") == 1
    assert Recorder.runs[0].steps == [0, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_does_not_start_is_named(tmp_path: Path, recorder: type[Recorder]) -> None:
    with pytest.raises(ValueError, match="trainer.logger: wandb cannot start: PermissionError: log in first"):
        Tracking("secret", "e", "wandb", directory=str(tmp_path))


def test_names_are_checked_and_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "wandb", Tracker("no_such_package", "x:y"))
    assert missing_packages(["console", "wandb"]) == [
        "trainer.logger names wandb, but its package is not installed here: pip install no_such_package"
    ]
    with pytest.raises(ValueError, match="logger 'vemlp_wandb' is not known; expected wandb, mlflow"):
        Tracking("a", "b", "vemlp_wandb", directory=".")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("wandb", ["wandb"]),
        ("['console','wandb']", ["console", "wandb"]),
        ('["console","tensorboard"]', ["console", "tensorboard"]),
        ("[console,wandb]", ["console", "wandb"]),
    ],
)
def test_a_name_and_lists_in_every_quoting(given: str, names: list[str]) -> None:
    assert load_config([f"trainer.logger={given}"]).trainer.logger == names


def test_tensorboard_shows_metrics_and_samples_as_they_are(tmp_path: Path) -> None:
    ours = _tracking(tmp_path, "tensorboard")
    ours.log_generations(SAMPLES, 1)
    ours.log(METRICS, 1)
    ours.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    [event] = shown.Tensors("val/generations/text_summary")
    assert "    1 + 1 =\n\n---\n\n    <b>2</b> ✓" in event.tensor_proto.string_val[0].decode() and event.step == 1
    assert [(scalar.step, scalar.value) for scalar in shown.Scalars("critic/score/mean")] == [(1, 0.25)]


@installed("wandb")
@pytest.mark.slow  # the default tests above hold what does not need the package
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = _tracking(tmp_path, "wandb")
    first.log_generations(SAMPLES, 0)
    first.log(METRICS, 0)
    first.log({"critic/score/mean": 0.75}, 1)
    run_id = first.logger["wandb"].run_id
    first.finish()
    again = _tracking(tmp_path, "wandb", first_step=1)
    again.log(METRICS, 1)
    again.log(METRICS, 2)
    again.finish()
    history, config = _wandb_records(tmp_path, run_id)
    steps = [(row["_step"], row["critic/score/mean"]) for row in history]
    assert steps == [(0, 0.25), (1, 0.75), (2, 0.25)]
    assert history[0]["val-core/digits/reward/mean@8"] == 0.5
    assert config["trainer"] == {"nnodes": 2} and config["data"] == CONFIG["data"]
    [table] = {path.name: path for path in tmp_path.rglob("*.table.json")}.values()
    assert json.loads(table.read_text())["data"] == [[0, *sample] for sample in SAMPLES]


def _wandb_records(root: Path, run_id: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every row of the history and the config in the transaction logs of an offline run."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for path in sorted(root.rglob(f"run-{run_id}.wandb")):
        for data in _log_entries(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = record.history.item
                history.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return history, config


def _log_entries(content: bytes) -> Iterator[bytes]:
    """The entries of a file in LevelDB's log format: 32 KiB blocks of (crc, length, part of an entry) and bytes."""
    position, entry, first = 0, b"", 7  # of the file, whose first block has wandb's header
    while position + 7 <= len(content):
        left = 32768 - (position + first) % 32768
        if left < 7:
            position += left
            continue
        _, length, part = struct.unpack_from("<IHB", content, position)
        entry += content[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # a whole entry, or its last part
            yield entry
            entry = b""


@installed("mlflow")
@pytest.mark.slow  # as above
@pytest.mark.parametrize("store", ["mlruns", "sqlite"])
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "sqlite" else (tmp_path / store).as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(uri)
    first = _tracking(tmp_path, "mlflow")
    first.log_generations(SAMPLES, 0)
    first.log(METRICS, 0)
    first.finish(is_done=False)
    again = _tracking(tmp_path, "mlflow", first_step=1)
    again.log({"critic/score/mean": 0.75}, 1)
    run_id = again.logger["mlflow"].run_id
    again.finish()
    client = mlflow.MlflowClient(uri)
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "sums"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "critic/score/mean")] == [(0, 0.25), (1, 0.75)]
    assert run.data.metrics["val-core/digits/reward/mean_at_8"] == 0.5
    assert run.data.params == {"trainer.nnodes": "2", "data.train_files": "['a.parquet']"}
    shown = json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/val_generations/step_0.json"))
    assert [tuple(row.values()) for row in shown] == SAMPLES


@installed("trackio")
@pytest.mark.slow  # as above
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    from trackio.sqlite_storage import SQLiteStorage

    ours = _tracking(tmp_path, "trackio")
    ours.log_generations(SAMPLES, 0)
    ours.log(METRICS, 0)
    ours.log(METRICS, 1)
    ours.finish()
    with sqlite3.connect(SQLiteStorage.get_project_db_path("sums")) as base:
        rows = [json.loads(row[0]) for row in base.execute("select metrics from metrics order by id")]
    assert sum("critic/score/mean" in row for row in rows) == 2 and any("val/generations" in row for row in rows)


@installed("swanlab")
@pytest.mark.slow  # as above
def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    ours = _tracking(tmp_path, "swanlab")
    ours.log_generations(SAMPLES, 0)
    ours.log(METRICS, 0)
    ours.finish()
    assert b"critic/score/mean" in _bytes_below(tmp_path / "swanlog")


@installed("clearml")
@pytest.mark.slow  # as above
def test_clearml_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: ClearML waits for threads that look at the program and its repository."""
    for kind in ("API", "WEB", "FILES"):
        monkeypatch.setenv(f"CLEARML_{kind}_HOST", "http://localhost:9")
    for name, value in (("API_ACCESS_KEY", "none"), ("API_SECRET_KEY", "none"), ("OFFLINE_MODE", "1")):
        monkeypatch.setenv(f"CLEARML_{name}", value)
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    program = (
        "from verl.utils.tracking import Tracking\n"
        f"run = Tracking('sums', 'first', ['clearml'], {CONFIG!r}, directory={str(tmp_path)!r})\n"
        f"run.log_generations({SAMPLES!r}, 0); run.log({METRICS!r}, 0); run.finish()"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py")]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    [metrics] = (tmp_path / "cache").rglob("metrics.jsonl")
    assert '"score/mean"' in metrics.read_text() and "0.25" in metrics.read_text()
    assert b"nnodes" in _bytes_below(metrics.parent) and "1 + 2 =" in (metrics.parent / "log.jsonl").read_text()


def _bytes_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_list_of_names_is_the_configs() -> None:
    names: Sequence[str] = Tracking.supported_backend
    assert load_config([f"trainer.logger=[{','.join(names)}]"]).trainer.problems("trainer") == []
