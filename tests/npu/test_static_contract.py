"""Every torch_npu call of the tree fits the op schemas of both supported torch_npu versions."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.npu.static_contract import VERSIONS, load_schemas, problems_of

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).parent / "fake" / "torch_npu.py"
PACKAGES = ("mindspeed", "vllm_ascend")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_fits(version: str) -> None:
    table = load_schemas(version)
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in files
        for problem in problems_of(path.read_text("utf-8"), table)
    ]
    assert files and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("torch_npu.npu_swiglu(x, axis=-1)", "no argument 'axis'"),
        ("torch_npu.npu_swiglu(x, -1, 2)", "3 positional arguments, at most 2"),
        ("torch_npu.npu_rms_norm(x)", "argument 'gamma' is missing"),
        ("torch_npu.npu_rms_norm(x, w, input=x)", "argument 'input' given twice"),
        ("torch_npu.npu_gone(x)", "no such op"),
        ("torch_npu.npu_swiglu(*xs)", "unpacked"),
        ("f = torch_npu.npu_swiglu", "passed around"),
        ("from torch_npu import npu_swiglu", "imported from torch_npu"),
        ("import torch_npu as n", "another name"),
        ("getattr(torch_npu, 'npu_swiglu')(x)", "getattr"),
        ("torch.ops.npu.npu_swiglu.default(x, axis=1)", "no argument 'axis'"),
    ],
)
def test_a_planted_fault_is_found(call: str, problem: str) -> None:
    found = problems_of(call, load_schemas("2.13.0"))
    assert len(found) == 1 and problem in found[0], found


def test_right_calls_pass() -> None:
    assert not problems_of(
        "torch_npu.npu_swiglu(x, dim=-1)\ntorch_npu.npu.set_device(0)\n", load_schemas("2.5.1.post1")
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_stand_in_takes_no_other_arguments_than_the_op(version: str) -> None:
    spec = importlib.util.spec_from_file_location("fake_torch_npu", FAKE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = load_schemas(version)
    fakes = {name: fn for name, fn in vars(module).items() if name.startswith("npu_")}
    assert set(fakes) <= set(table)  # ops that are not here run on the simulator only
    for name, function in fakes.items():
        parameters = inspect.signature(function).parameters.values()
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        keyword_only = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert any(
            positional == schema.positional[: len(positional)] and keyword_only <= set(schema.keyword_only)
            for schema in table[name]
        ), name
