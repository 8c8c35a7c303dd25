"""The table of ops that cost a die more than their bytes, and how a run's calls are looked up in it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.doctor.die_ops import CASES
from tools.plan.op_costs import TABLE, by_phase, cost_of, main, report


@pytest.mark.parametrize(
    ("op", "types", "on_control", "waits"),
    [
        ("aten::add.Tensor", "Float,scalar:Double->Float", False, False),  # a number of Python's is no tensor there
        ("aten::add_.Tensor", "Double,Double", True, False),
        ("aten::__rshift__.Scalar", "Int->Int", True, False),
        ("aten::sort", "Long->Long,Long", True, False),
        ("aten::sort", "Float->Float,Long", False, False),
        ("aten::_to_copy", "Char->Int", True, False),
        ("aten::_to_copy", "host:Char->Char", False, True),  # bytes travel, no kernel runs
        ("aten::copy_", "Float,host:Float", False, True),
        ("aten::copy_", "Float,pinned:Float async", False, False),
        ("aten::_local_scalar_dense", "Float->", False, True),
        ("aten::index.Tensor", "Float,Bool->Float", False, True),
        ("aten::index.Tensor", "Float,Long->Float", False, False),
        ("aten::repeat_interleave.self_Tensor", "Long,Long->Long", False, True),
        ("aten::repeat_interleave.self_Tensor", "Long,Long->Long sized", False, False),
        ("npu_rms_norm", "Float,Float->Float,Float", False, False),
    ],
)
def test_costs(op: str, types: str, on_control: bool, waits: bool) -> None:
    cost = cost_of(op, types)
    assert cost is not None and (cost.on_control, cost.waits) == (on_control, waits)


def test_what_a_die_must_confirm_names_a_row_of_the_doctor() -> None:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    known = {op for entry in table["entry"] for op in entry["ops"]}
    assert set(table["die"]) <= {case.name for case in CASES}
    assert {op for ops in table["die"].values() for op in ops} <= known


def test_every_entry_has_a_source_and_no_op_two_entries() -> None:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    assert {entry["source"] for entry in table["entry"]} | {"npu"} == set(table["sources"])
    ops = [op for entry in table["entry"] for op in entry["ops"]]
    assert len(ops) == len(set(ops))


def test_a_report_names_what_is_remarkable_in_each_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [
        ("decode", "", "", 4),
        ("decode", "aten::add.Tensor", "Float,Float->Float", 99),
        ("decode", "aten::sort", "Long->Long,Long", 8),
        ("decode", "aten::fft_fft", "Float->ComplexFloat", 2),
        ("prefill", "", "", 1),
    ]
    text = report(by_phase(calls))
    assert text.splitlines() == [
        "decode, 4 times",
        "  control processor: 2.0 aten::sort Long->Long,Long",
        "  not in the table: 0.5 aten::fft_fft Float->ComplexFloat",
    ]
    lines = ("\t".join(map(str, call)) for call in calls)
    (tmp_path / "7.phases").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["op_costs", str(tmp_path)])
    main()
    assert capsys.readouterr().out == f"== process 7\n{text}\n"
