"""The published steps of ``published.toml`` as shapes that can be predicted."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hf_formats.config import HFModelConfig, load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import DeviceProfile, load_device
from tools.plan.model_work import model_work, train_flops_per_token
from tools.plan.timing.run_shape import Lengths, MicroBatches, RolloutShape, RunShape, TrainShape

TABLE = Path(__file__).with_name("published.toml")
MODELS = Path(__file__).parents[1] / "models"


@dataclass(frozen=True)
class PublishedRun:
    """One published step.

    seconds: by phase, or by phases joined with ``+`` that the source counts as one · total_s: of the step · assumed:
    what the source leaves open · group: rows of one software on one cluster, whose errors are alike.
    """

    shape: RunShape
    device: DeviceProfile
    seconds: Mapping[str, float]
    total_s: float
    source: str
    assumed: str
    group: str

    @property
    def name(self) -> str:
        """The row's name."""
        return self.shape.name


def published_runs(path: Path = TABLE) -> list[PublishedRun]:
    """Every row; ValueError for one whose shape cannot be."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for row in table["run"]:
        rows[row["name"]] = _merged(rows[row["like"]], row) if "like" in row else row
    return [_run(row) for row in rows.values()]


def published_model(name: str) -> HFModelConfig:
    """The figures of a model of ``models/``."""
    return load_hf_config(MODELS / name)


def _merged(like: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with the values of ``like`` that it does not name; the seconds are its own."""
    tables = {key: like[key] | row.get(key, {}) for key in ("lengths", "layout", "train", "rollout")}
    return like | row | tables | {"seconds": row.get("seconds", {})}


def _run(row: dict[str, Any]) -> PublishedRun:
    train: dict[str, Any] = dict(row["train"])
    train |= {kind: MicroBatches(**train[kind]) for kind in ("update", "log_prob")}
    rollout: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row["rollout"].items()
    }
    layout = ParallelLayout.from_json(row["layout"])
    given = {"name", "model", "lengths", "train", "rollout"}
    plain = {field.name for field in fields(RunShape)} - given
    shape = RunShape(
        name=row["name"],
        model=published_model(row.get("model", "deepseek_v3")),
        lengths=Lengths(**row["lengths"]),
        train=TrainShape(layout=layout, **train),
        rollout=RolloutShape(world_size=layout.world_size, **rollout),
        **{key: value for key, value in row.items() if key in plain},
    )
    if problems := shape.problems():
        raise ValueError(f"{TABLE.name}: {row['name']}: " + "; ".join(problems))
    device = load_device(row["device"])
    return PublishedRun(
        shape=shape,
        device=device,
        seconds=row.get("seconds", {}) | _update_of_mfu(shape, device, row.get("update_mfu")),
        total_s=row["total_s"],
        source=row["source"],
        assumed=row["assumed"],
        group=row["group"],
    )


def _update_of_mfu(shape: RunShape, device: DeviceProfile, mfu: float | None) -> dict[str, float]:
    """The seconds of an update of which the source gives the share of peak: three forward passes' operations."""
    if mfu is None:
        return {}
    flops = 3 * train_flops_per_token(model_work(shape.model), shape.lengths.paid / 2)
    return {"update": flops * shape.num_sequences * shape.lengths.mean / (mfu * device.peak_flops * shape.num_devices)}
