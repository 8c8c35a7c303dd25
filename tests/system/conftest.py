"""What the system tests share: one prepared job, and one run of it that nothing happens to."""

from __future__ import annotations

import json

import pytest

from recipes.r1_zero.arithmetic import make_set
from recipes.r1_zero.json_to_parquet import main as json_to_parquet
from recipes.r1_zero.make_base_model import make_base_model
from tests.system.jobs import Job, Prepared


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Made by the functions behind the launcher's own stages, with very few warm-up steps."""
    folder = tmp_path_factory.mktemp("prepared")
    json_path = folder / "arithmetic.json"
    json_path.write_text(json.dumps(make_set(num_problems=240)))
    assert json_to_parquet(["--json_path", str(json_path), "--output_dir", str(folder / "data")]) == 0
    train = folder / "data" / "train.parquet"
    make_base_model(train, folder / "model", seed=42, num_steps=12, batch_size=32, num_processes=1)
    return Prepared(json_path, folder / "model")


@pytest.fixture(scope="session")
def uninterrupted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The reference: the job run through once on one machine."""
    job = Job(prepared, tmp_path_factory.mktemp("uninterrupted"))
    job.finish()
    return job
