"""Lets a test run Ascend ops where there is no torch_npu, by the stand-in of ``tests/npu/fake``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).parent / "fake"


@pytest.fixture
def torch_npu_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import torch_npu`` finds the stand-in during the test, and nothing of it stays afterwards."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    yield
    sys.modules.pop("torch_npu", None)
