"""What the system tests share: one prepared job, and one run of it that nothing happens to."""

from __future__ import annotations

import pytest

from tests.system.jobs import Job, Prepared, prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The inputs of every run here."""
    return prepare(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def uninterrupted(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The reference: the job run through once on one machine."""
    job = Job(prepared, tmp_path_factory.mktemp("uninterrupted"))
    job.finish()
    return job
