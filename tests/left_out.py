"""The key under which a run stores the test files that its environment cannot run; its last lines name them."""

from __future__ import annotations

import pytest

LEFT_OUT = pytest.StashKey[set[str]]()
