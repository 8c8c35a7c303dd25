"""The CPU kernels of both engines compiled for a processor with smaller registers than this one's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_formats.cpu_kernels import instructions

COMPILER = """#!/bin/sh
for argument; do
    shift
    case "$argument" in
        -march=native) set -- "$@" -march={processor} ;;
        -mavx512bf16 | -mamx-*) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec g++ "$@"
"""
TESTS = Path(__file__).parent
NAMES = ("megatron/test_cpu_ops", "vllm/test_cpu_ops", "vllm/test_cpu_grouped_query", "vllm/test_panels")
FILES = [str(TESTS / f"{name}.py") for name in NAMES]


@pytest.mark.slow  # compiles all kernels
@pytest.mark.timeout(600)
@pytest.mark.skipif("avx512f" not in instructions(), reason="the default run has kernels of such a processor")
@pytest.mark.parametrize("processor", ["haswell", "nehalem"])  # 8 and 4 lanes
def test_kernels_without_avx512_equal_their_references(processor: str, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.replace("{processor}", processor))
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    assert len(list((tmp_path / "cache").rglob("kernels-*.so"))) == 2
