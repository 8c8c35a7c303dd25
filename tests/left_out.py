"""Test files that an environment cannot run, kept until the end of the run says so."""

from __future__ import annotations

import pytest

LEFT_OUT = pytest.StashKey[set[str]]()
