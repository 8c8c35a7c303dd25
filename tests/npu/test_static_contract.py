"""Every use of torch_npu in the tree fits both supported torch_npu versions; planted faults of each kind are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.npu.static_contract import VERSIONS, Contract, load_contract, problems_of, uses_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron", "mindspeed", "mindspeed_llm", "recipes", "tools", "verl", "vllm", "vllm_ascend")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
CONTRACTS = {version: load_contract(version) for version in VERSIONS}
# A function that has a tensor, a count and a list of tensors, to plant calls in.
AROUND = """
import torch
import torch_npu
ROWS = 0
def f(x: torch.Tensor, k: int, xs: list[torch.Tensor]) -> None:
    {}
"""


def found_in(line: str, contracts: dict[str, Contract] | None = None) -> list[str]:
    return problems_of(AROUND.format(line), contracts or CONTRACTS)


def test_every_use_fits_both_versions() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{problem}"
        for path in FILES
        for problem in problems_of(path.read_text("utf-8"), CONTRACTS, is_compat=path.name == "_compat.py")
    ]
    assert FILES and not found, "\n" + "\n".join(found)


def test_exactly_the_used_names_are_kept() -> None:
    uses = [use for path in FILES for use in uses_of(path.read_text("utf-8"))]
    ops = {use.op[0] for use in uses if use.op is not None}
    functions = {use.python_name for use in uses if use.op is None}
    assert ops == set().union(*(contract.ops for contract in CONTRACTS.values()))
    assert functions == set().union(*(contract.functions for contract in CONTRACTS.values()))
    assert {"npu_fusion_attention", "npu_rms_norm"} <= ops


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch_npu.npu_swiglu(x, axis=-1)", "no argument 'axis'"),
        ("torch_npu.npu_swiglu(x, -1, 2)", "3 positional arguments, at most 2"),
        ("torch_npu.npu_rms_norm(x)", "argument 'gamma' is missing"),
        ("torch_npu.npu_rms_norm(x, x, input=x)", "argument 'input' given twice"),
        ("torch_npu.npu.set_device()", "argument 'device' is missing"),
        ("torch_npu.npu.mem_get_info(dev=0)", "no argument 'dev'"),
        ("torch.npu.graph_task_group_end(1, 2)", "2 positional arguments, at most 1"),
    ],
)
def test_names_and_counts(line: str, problem: str) -> None:
    assert_found(line, problem)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch_npu.npu_swiglu(x, '-1')", "argument 'dim' is str, but int is wanted"),
        ("torch_npu.npu_swiglu(x, -1.0)", "argument 'dim' is float, but int is wanted"),
        ("torch_npu.npu_swiglu(x, None)", "argument 'dim' is None, but int is wanted"),
        ("torch_npu.npu_swiglu([x])", "argument 'input' is list[Tensor], but Tensor is wanted"),
        ("torch_npu.npu_swiglu(None)", "argument 'input' is None, but Tensor is wanted"),
        ("torch_npu.npu_swiglu(k)", "argument 'input' is int, but Tensor is wanted"),
        ("torch_npu.npu_rms_norm(x, x.shape)", "argument 'gamma' is list[int], but Tensor is wanted"),
        ("torch_npu.npu_rms_norm(x, xs, k)", "argument 'gamma' is list[Tensor], but Tensor is wanted"),
        ("torch_npu.npu_rotary_mul(x, x, x, rotary_mode=ROWS)", "argument 'rotary_mode' is int, but str is wanted"),
        ("torch_npu.npu_grouped_matmul(x, xs)", "argument 'x' is Tensor, but Tensor[] is wanted"),
        ("torch_npu.npu_grouped_matmul(xs, [k])", "argument 'weight' is list[int], but Tensor[] is wanted"),
        ("torch_npu.npu_grouped_matmul(xs, xs, group_list=k)", "argument 'group_list' is int"),
        ("torch_npu.npu_moe_gating_top_k(x, k, out_flag=1)", "argument 'out_flag' is int, but bool is wanted"),
        ("y = x.unsqueeze(0); torch_npu.npu_moe_token_permute(x, x, y)", "'num_out_tokens' is Tensor, but int? is"),
        (
            "torch_npu.npu_fusion_attention(x, x, x, k, 'TND', actual_seq_qlen=x)",
            "argument 'actual_seq_qlen' is Tensor, but int[]? is wanted",
        ),
    ],
)
def test_types(line: str, problem: str) -> None:
    assert_found(line, problem)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch_npu.npu_gone(x)", "there is no such op"),
        ("torch.ops.npu.npu_gone(x)", "there is no such op"),
        ("torch_npu.npu.gone()", "there is no such name"),
        ("torch_npu.npu_swiglu.out(x)", "there is no such op"),
    ],
)
def test_removed_ops_and_functions(line: str, problem: str) -> None:
    assert_found(line, problem)


@pytest.mark.parametrize(
    "line",
    [
        "import torch_npu as n; n.npu_swiglu(x, axis=-1)",
        "from torch_npu import npu_swiglu; npu_swiglu(x, axis=-1)",
        "from torch_npu import npu_swiglu as act; act(x, axis=-1)",
        "act = torch_npu.npu_swiglu; act(x, axis=-1)",
        "n = torch_npu; act = n.npu_swiglu; act(x, axis=-1)",
        "n, m = torch_npu, 1; n.npu_swiglu(x, axis=-1)",
        "getattr(torch_npu, 'npu_swiglu')(x, axis=-1)",
        "torch.ops.npu.npu_swiglu(x, axis=-1)",
        "torch.ops.npu.npu_swiglu.default(x, axis=-1)",
        "ops = torch.ops.npu; ops.npu_swiglu(x, axis=-1)",
        "from torch.ops import npu; npu.npu_swiglu(x, axis=-1)",
        "import importlib; importlib.import_module('torch_npu').npu_swiglu(x, axis=-1)",
        "__import__('torch_npu').npu_swiglu(x, axis=-1)",
        "import sys; sys.modules['torch_npu'].npu_swiglu(x, axis=-1)",
        "g = lambda y: torch_npu.npu_swiglu(y, axis=-1)",
        "(act := torch_npu.npu_swiglu)(x, axis=-1) or act(x, axis=-1)",
    ],
)
def test_calls_by_another_name(line: str) -> None:
    found = found_in(line)
    assert found and all("no argument 'axis'" in problem for problem in found), found
    assert not found_in(line.replace("axis=", "dim=")), "the right call by the same name"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("torch_npu.npu_swiglu(*xs)", "unpacked"),
        ("torch_npu.npu_swiglu(**{'input': x})", "unpacked"),
        ("apply(torch_npu.npu_swiglu, x)", "passed around"),
        ("functools.partial(torch_npu.npu_swiglu, x)", "passed around"),
        ("table = {'act': torch_npu.npu_swiglu}", "passed around"),
        ("self.act = torch_npu.npu_swiglu", "passed around"),
        ("self.npu = vars(torch_npu)", "passed around"),
        ("getattr(torch_npu, 'npu_' + name)(x)", "computed name"),
        ("getattr(torch.ops.npu, name)(x)", "computed name"),
    ],
)
def test_what_cannot_be_followed(line: str, problem: str) -> None:
    assert_found(line, problem)


def test_names_imported_with_a_star() -> None:
    (found,) = problems_of("from torch_npu import *", CONTRACTS)
    assert "write the names" in found


def test_an_op_that_one_version_lacks() -> None:
    old = Contract({**CONTRACTS["2.5.1.post1"].ops}, CONTRACTS["2.5.1.post1"].functions)
    del old.ops["npu_swiglu"]
    contracts = {"old": old, "new": CONTRACTS["2.13.0"]}
    (found,) = found_in("torch_npu.npu_swiglu(x)", contracts)
    assert "no such op" in found and "(old)" in found
    one_form = "import torch_npu\ndef act(x):\n    return torch_npu.npu_swiglu(x)\n"
    (found,) = problems_of(one_form, contracts, is_compat=True)
    assert found == "3: act has no form for torch_npu old"
    both_forms = one_form + "    return torch_npu.npu_rms_norm(x, x)\n"
    assert problems_of(both_forms, contracts, is_compat=True) == []
    assert len(problems_of(both_forms.replace("(x, x)", "(x)"), contracts, is_compat=True)) == 2


def test_an_argument_that_one_version_lacks() -> None:
    (found,) = found_in("torch_npu.npu_rotary_mul(x, x, x, rotate=x)")
    assert found.endswith("no argument 'rotate' (2.5.1.post1)")


@pytest.mark.parametrize(
    "line",
    [
        "torch_npu.npu_swiglu(x, dim=-1); torch_npu.npu.set_device(0)",
        "torch_npu.npu_grouped_matmul([x], [x.t()], group_list=x, split_item=3, group_type=ROWS)",
        "torch_npu.npu_fusion_attention(x, x, x, k, 'TND', atten_mask=x if k else None, actual_seq_qlen=x.tolist())",
        "torch_npu.npu_rms_norm(x, x, epsilon=1e-6)[0]",
        "torch_npu = 3; torch_npu.npu_gone",
    ],
)
def test_right_uses_pass(line: str) -> None:
    assert not found_in(line)


def assert_found(line: str, problem: str) -> None:
    found = found_in(line)
    assert len(found) == 1 and problem in found[0], found
