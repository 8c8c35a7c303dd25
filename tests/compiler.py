"""Tests of compiled kernels: where there is no C++ compiler they are left out, and the run's last lines say so once."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
REASON = "needs a compiler"
REMEDY = "install g++ 12 or newer (Debian: apt-get install g++), or name other compilers in CXX and CC"
UNCOMPILED = pytest.StashKey[set[str]]()  # the files that were left out
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason=REASON)
needs_c_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason=REASON)


def builds_kernels(path: Path) -> bool:
    """Return whether a test file builds kernels when it is imported, as its line BUILDS_KERNELS says."""
    text = path.read_text(encoding="utf-8") if path.name.startswith("test_") and path.suffix == ".py" else ""
    return re.search("^BUILDS_KERNELS = True", text, re.MULTILINE) is not None
