"""What is kept of the installed torch_npu for the static contract is what it reports."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tests.npu.static_contract import SCHEMAS, VERSIONS, load_contract

pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
torch_npu = pytest.importorskip("torch_npu")
INSTALLED = torch_npu.__version__.split("+")[0]


def test_the_installed_version_is_a_supported_one() -> None:
    assert INSTALLED in VERSIONS


def test_schemas() -> None:
    contract = load_contract(INSTALLED)
    reported = {str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("npu::")}
    used = {line for line in reported if line.removeprefix("npu::").split("(")[0].split(".")[0] in contract.ops}
    assert set((SCHEMAS / f"torch_npu_{INSTALLED}.txt").read_text("utf-8").splitlines()) == used


@pytest.mark.parametrize("line", (SCHEMAS / f"python_api_{INSTALLED}.txt").read_text("utf-8").splitlines())
def test_python_names(line: str) -> None:
    name, _, arguments = line.partition("(")
    found: Any = torch_npu
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    if type(found).__name__ == "pybind11_type":  # has no signature to compare with
        assert arguments == ")" and found() is not None
        return
    assert f"({arguments}" == signature_of(found)


def signature_of(function: Any) -> str:
    """``(arg, other=..., *, more=...)``."""
    texts: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        texts.append(f"{stars}{parameter.name}{'' if parameter.default is parameter.empty else '=...'}")
    return f"({', '.join(texts)})"
