"""`python -m tools.doctor --die` on two simulated dies, and what it says of what is wrong, slow or fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.launcher import run_ranks
from tools.doctor import __main__ as doctor
from tools.doctor import die, die_ops
from tools.doctor.die_check import Check, Die
from tools.doctor.finding import Finding
from vllm.platforms import resolve_platform

TIMEOUT_S = 200
ROWS = [check.name for check in [*die.checks_alone(0, 1), *die.checks_together()]]
CASES = {case.name: case for case in die_ops.CASES}


def run_doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.doctor", "--die"]
    environment = {**os.environ, "COLUMNS": "220", "HCCL_BUFFSIZE": "300", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def one_die() -> Die:
    platform = resolve_platform("npu")
    return Die(platform.device(0), platform, 0, 1)


def findings_of_this_rank() -> list[Finding]:
    platform, rank = resolve_platform("npu"), dist.get_rank()
    own = Die(platform.device(rank), platform, rank, 2)
    checks = [*die.checks_alone(rank, 2), *die.checks_together()]
    return [die.finding_of(check, own) for check in checks]


def test_every_check_passes_on_two_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", "2")
    monkeypatch.setenv("HCCL_BUFFSIZE", "300")
    found = [finding for of_rank in run_ranks(findings_of_this_rank, 2, device="npu") for finding in of_rank]
    assert {finding.name for finding in found} == set(ROWS)
    assert not [finding for finding in found if finding.remedy or "skipped" in finding.value]


@pytest.mark.slow  # processes of its own, which import everything anew
def test_the_command_passes_on_two_dies() -> None:
    done = run_doctor(FAKE_NPU_COUNT="2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {cells[2].strip(): cells for cells in (line.split("│") for line in done.stdout.splitlines()) if cells[2:]}
    assert [name for name in lines if name] == ROWS
    assert {cells[1].strip() for cells in lines.values()} == {"ok"}, done.stdout
    assert "skipped" not in done.stdout and "times are not judged" in done.stdout


def test_without_a_die_it_says_what_is_missing() -> None:
    done = run_doctor(ASCEND_RT_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "no Ascend device is visible" in done.stderr


def add_one_on_the_die(x: Tensor) -> Tensor:
    return x if x.device.type == "cpu" else x + (x == 7)


def test_a_wrong_value_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CASES["int64 cumsum"]
    planted = replace(right, run=add_one_on_the_die)
    finding = die_ops.check(planted, one_die())
    assert finding.is_fatal and "values are wrong" in finding.value and planted.used_in in finding.remedy
    assert exit_code_of([finding], monkeypatch) == 1
    assert exit_code_of([die_ops.check(right, one_die())], monkeypatch) == 0


def exit_code_of(findings: list[Finding], monkeypatch: pytest.MonkeyPatch) -> object:
    """Of the command, when the dies' ranks have found this."""
    monkeypatch.setattr(sys, "argv", ["doctor", "--die"])
    monkeypatch.setattr(die, "examine", lambda: findings)
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    return ended.value.code


def slow_on_the_die(x: Tensor) -> Tensor:
    time.sleep(0 if x.device.type == "cpu" else 0.3)
    return x + 1


def test_an_op_that_takes_much_longer_than_its_bytes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = die_ops.Case("slow", "nobody.py", lambda _: (torch.arange(10),), slow_on_the_die)
    assert not die_ops.check(slow, one_die()).is_fatal
    monkeypatch.setattr(die_ops, "is_simulated", lambda: False)
    finding = die_ops.check(slow, one_die())
    assert finding.is_fatal and "control processor" in finding.remedy and "nobody.py" in finding.remedy


def test_what_a_check_raises_is_its_finding() -> None:
    def fail(_: Die) -> Finding:
        raise RuntimeError("error 507018\nand a long trace")

    finding = die.finding_of(Check("op", fail), one_die())
    assert finding.is_fatal and finding.value == "failed: RuntimeError: error 507018"


def test_rows_of_ranks_that_did_not_end_well() -> None:
    """One die has nothing to exchange with; of several ranks the worst finding counts; no row is left out."""
    alone = [Finding(check.name, "well") for check in die.checks_alone(0, 1)]
    found = {finding.name: [finding] for finding in alone}
    on_one = die.rows(1, found, [])
    assert [row.name for row in on_one] == ROWS and not any(row.remedy for row in on_one)
    assert {row.value for row in on_one[len(alone) :]} == {"skipped: needs two dies"}
    first = die.checks_together()[0].name
    found[first] = [Finding(first, "well"), Finding(first, "differs", "report it", is_fatal=True)]
    on_two = die.rows(2, found, ["rank 1 ended with exit code -11"])
    reached = len(alone) + 1
    assert on_two[len(alone)].value == "differs" and on_two[: len(alone)] == alone
    assert all(row.is_fatal and "exit code -11" in row.value for row in on_two[reached:]) and on_two[reached:]
