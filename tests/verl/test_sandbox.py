"""What the sandbox gives a program, what it says of it, when it refuses; hostile ones: test_hostile_answers."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from verl.utils.reward_score.sandbox import SandboxLimits, missing_protection, run_program, sandbox_layers
from verl.utils.reward_score.sandbox.inside.seccomp import Instruction, filter_for
from verl.utils.reward_score.sandbox.inside.syscalls import NUMBERS

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534


def test_this_machine_can_run_programs() -> None:
    assert missing_protection() == ""
    assert {"limits", "seccomp"} <= set(sandbox_layers())


def test_a_program_reads_computes_and_prints() -> None:
    result = run_program("import sys\nfor line in sys.stdin: print(int(line) ** 2)", "3\n4\n")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("ok", "9\n16\n", "", 0)
    assert 0 < result.seconds < SandboxLimits().wall_s


@pytest.mark.parametrize(
    "program, prints",
    [
        ("import threading\nt = threading.Thread(target=print, args=('x',))\nt.start()\nt.join()", "x\n"),
        ("import asyncio\nasync def f(): await asyncio.sleep(0.01); print('x')\nasyncio.run(f())", "x\n"),
        ("import numpy\nprint(numpy.linalg.norm(numpy.ones(4)))", "2.0\n"),
        ("import heapq, bisect, functools, itertools, fractions, decimal, re, random\nprint('x')", "x\n"),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n  x: int = 1\nprint(A())", "A(x=1)\n"),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)", "A\n"),
        ("import sys\nsys.setrecursionlimit(10**5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50000))", "50000\n"),
        ("print({'b', 'a', 'c'} == set('abc'), hash('x') == hash('x'))\nraise SystemExit", "True True\n"),
        ("import signal, time\nsignal.signal(14, lambda *a: print('x'))\nsignal.alarm(1)\ntime.sleep(2)", "x\n"),
        ("import sys, os\nprint(sys.argv, __name__, os.environ.get('PYTHONPATH'))", "['program.py'] __main__ None\n"),
        ("import datetime, time\nprint(time.time() > 1e9, datetime.datetime.now().year > 2000)", "True True\n"),
        ("print('\\u00fc\\U0001f600')", "\u00fc\U0001f600\n"),
    ],
)
def test_what_ordinary_programs_use_is_there(program: str, prints: str) -> None:
    result = run_program(program)
    assert (result.stdout, result.stderr) == (prints, "")
    assert result.is_ok


def test_a_failed_program_says_why() -> None:
    result = run_program("print('before')\n1 / 0")
    assert (result.status, result.stdout, result.exit_code) == ("failed", "before\n", 1)
    assert "ZeroDivisionError" in result.stderr
    assert run_program("import sys; sys.exit(3)").exit_code == 3
    assert run_program("import os; os.kill(os.getpid(), 9)").exit_code == -signal.SIGKILL


def test_tests_run_in_the_programs_scope_and_not_its_main_part() -> None:
    program = "def f(x): return x + 1\nif __name__ == '__main__': raise SystemExit(input())"
    assert run_program(program, tests="assert f(1) == 2").is_ok
    wrong = run_program(program, tests="assert f(1) == 3, f(1)")
    assert wrong.status == "failed" and "AssertionError: 2" in wrong.stderr


@pytest.mark.parametrize("program", ["raise SystemExit", "import os; os._exit(0)", "import sys; sys.exit(0)", ""])
def test_ending_early_is_not_passing(program: str) -> None:
    assert run_program(program, tests="assert f(1) == 2").status == "failed"


@pytest.mark.timeout(30)
def test_limits_end_a_program_and_name_themselves() -> None:
    limits = SandboxLimits(wall_s=1.0, output_bytes=1000, memory_bytes=200 << 20, threads=8)
    assert run_program("while True: pass", limits=limits).status == "timeout"
    assert run_program("print('x' * 10**6)", limits=limits).status == "output"
    result = run_program("x = bytearray(300 << 20)", limits=limits)
    assert result.status == "failed" and "MemoryError" in result.stderr
    threads = "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(9,)).start()"
    assert run_program(threads, limits=SandboxLimits(wall_s=5.0, threads=8)).status == "threads"
    burnt = run_program("while True: pass", limits=SandboxLimits(wall_s=20.0, cpu_s=1))
    assert burnt.status == "timeout" and burnt.exit_code == -signal.SIGXCPU and burnt.seconds < 10
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(deaf, limits=SandboxLimits(wall_s=20.0, cpu_s=1)).exit_code == -signal.SIGKILL


@pytest.mark.timeout(30)
def test_much_input_that_nobody_reads_and_much_output_at_once() -> None:
    assert run_program("print('x')", "y" * 5_000_000).stdout == "x\n"
    echo = run_program("import sys\nsys.stdout.write(sys.stdin.read())", "y" * 5_000_000)
    assert echo.stdout == "y" * 5_000_000


@pytest.mark.timeout(30)
def test_a_program_ends_with_the_process_that_runs_it() -> None:
    code = (
        "from verl.utils.reward_score.sandbox import *; run_program('while True: pass', limits=SandboxLimits(60.0, 60))"
    )
    grader = subprocess.Popen([sys.executable, "-c", code])
    process = psutil.Process(grader.pid)
    deadline = time.monotonic() + 20
    while not (children := [c for c in process.children() if c.cpu_times().user > 0.3]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(grader.pid, signal.SIGKILL)
    grader.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def test_no_descriptor_is_left_open() -> None:
    run_program("print(1)")
    gc.collect()  # an earlier test's process groups, which would close theirs in between
    before = os.listdir("/proc/self/fd")
    for program in ("print(1)", "while True: print(1)", "def def"):
        run_program(program, limits=SandboxLimits(output_bytes=100))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("machine, x86", [("x86_64", True), ("aarch64", False)])
def test_the_filter_allows_what_is_listed_and_looks_at_arguments(machine: str, x86: bool) -> None:
    """The instructions, run by hand: a kernel of the other machine is not here."""
    arch = 0xC000003E if x86 else 0xC00000B7
    decide = _decider(filter_for(machine, 77), arch)
    number = {name: numbers[0 if x86 else 1] for name, numbers in NUMBERS.items()}
    allow, refuse = "allow", errno.EPERM
    assert decide(number["read"]) == decide(number["futex"]) == decide(number["mmap"]) == allow
    assert decide(number["openat"], 0, 0, os.O_RDONLY | os.O_CLOEXEC) == allow
    assert decide(number["openat"], 0, 0, os.O_WRONLY) == decide(number["openat"], 0, 0, os.O_CREAT) == errno.EROFS
    assert decide(number["clone"], 0x3D0F00) == allow, "the flags of a thread"
    assert decide(number["clone"], 0x1200011) == refuse, "the flags of fork"
    assert decide(number["clone3"]) == decide(number["openat2"]) == errno.ENOSYS
    assert decide(number["kill"], 77) == decide(number["tgkill"], 77, 78) == allow
    assert decide(number["kill"], 76) == decide(number["kill"], 0xFFFFFFFF) == decide(number["kill"], 0) == refuse
    assert decide(number["prlimit64"], 0) == allow and decide(number["prlimit64"], 1) == refuse
    assert decide(number["socketpair"], 1) == allow and decide(number["socketpair"], 2) == refuse
    assert decide(number["fcntl"], 0, 3) == allow and decide(number["fcntl"], 0, 8) == refuse
    assert decide(number["ioctl"], 0, 0x5401) == allow and decide(number["ioctl"], 0, 0x5412) == errno.ENOTTY
    assert decide(number["landlock_restrict_self"]) == refuse
    # socket, connect, execve, ptrace, unlinkat, mkdirat, renameat2, mount, bpf, io_uring_setup, memfd_create
    forbidden = (41, 42, 59, 101, 263, 258, 316, 165, 321, 425, 319) if x86 else (
        198, 203, 221, 117, 35, 34, 276, 40, 280, 425, 279)  # fmt: skip
    assert {decide(call) for call in forbidden} == {refuse}
    assert _decider(filter_for(machine, 77), 0x40000003)(1) == "kill", "calls of another machine's table"
    assert decide(0x40000000) == refuse


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(ValueError, match="no system call table for 'riscv64'; known: x86_64, aarch64"):
        filter_for("riscv64", 1)


LANDLOCK, UNSHARE, PRCTL = 444, 272, 157


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are those of x86_64")
@pytest.mark.parametrize(
    "is_root, taken, variables, says",
    [
        # root in a container without namespaces, on a kernel of openEuler 22.03
        (True, (LANDLOCK, UNSHARE), {}, "does not hold on this machine: it can read other files"),
        (True, (LANDLOCK, UNSHARE), {"VERL_SANDBOX_MAY_READ": "1"}, "holds\nlimits, no capabilities, seccomp"),
        (True, (LANDLOCK,), {}, "holds\nlimits, namespaces, own root, no capabilities, seccomp"),
        (False, (UNSHARE,), {}, "holds\nlimits, landlock, no capabilities, seccomp"),
        (False, (LANDLOCK,), {}, "holds\nlimits, namespaces, own root, no capabilities, seccomp"),
        (False, (LANDLOCK, UNSHARE), {}, "does not hold on this machine: it can read"),
        (
            False,
            (LANDLOCK, UNSHARE),
            {"VERL_SANDBOX_MAY_READ": "1"},
            "does not hold on this machine: it can read its parent's environment",
        ),
        (True, (PRCTL,), {}, "does not start on this machine: OSError"),
    ],
)
def test_where_the_kernel_offers_too_little_programs_are_refused(
    is_root: bool, taken: tuple[int, ...], variables: dict[str, str], says: str
) -> None:
    if is_root and os.getuid():
        pytest.skip("needs root")
    here = set(sandbox_layers())
    wanted = {"landlock": LANDLOCK, "namespaces": UNSHARE}
    if says.startswith("holds") and not all(name in here or number in taken for name, number in wanted.items()):
        pytest.skip(f"this machine has only {', '.join(sorted(here))}")
    user = 0 if is_root else os.getuid() or NOBODY
    shown = subprocess.run(
        [_python_for(user), "-m", "tests.verl.without_system_calls", str(user), *map(str, taken)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert says in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are those of x86_64")
def test_without_landlock_a_program_has_its_packages_and_no_other_file(tmp_path: Path) -> None:
    secret = tmp_path / "test.parquet"
    secret.write_text("expected output")
    program = "import decimal, json, numpy, os\nprint(numpy.arange(3).sum(), decimal.Decimal(2), os.listdir('/'))\n"
    program += f"for path in ({str(secret)!r}, '/etc/passwd', '/proc/1/environ', {str(ROOT / 'pyproject.toml')!r}):\n"
    program += "    try:\n        print(open(path).read(1))\n    except OSError as error:\n        print(error.errno)\n"
    code = f"from tests.verl.without_system_calls import *; take_away([{LANDLOCK}])\n"
    code += f"from verl.utils.reward_score.sandbox import *\nprint(sandbox_layers())\nprint(run_program({program!r}))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    if "namespaces" not in shown.stdout:
        pytest.skip("this machine lets no user make namespaces")
    assert "own root" in shown.stdout and "status='ok'" in shown.stdout, shown.stdout + shown.stderr
    assert "3 2 [" in shown.stdout and "2\\n2\\n2\\n2\\n" in shown.stdout, "ENOENT for every file outside"


@pytest.mark.timeout(60)
def test_a_refusal_is_an_error_that_says_what_is_missing() -> None:
    code = "from tests.verl.without_system_calls import *; take_away([157])\n"
    code += "from verl.utils.reward_score.sandbox import *\n"
    code += "try: run_program('print(1)')\nexcept SandboxError as error: print('refused:', error)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert shown.stdout.startswith("refused: the sandbox for submitted programs does not start"), shown.stderr


def _python_for(user: int) -> str:
    """This interpreter, or for a user who may not enter its folder the system's."""
    if user == os.getuid():
        return sys.executable
    found = "/usr/bin/python3"
    version = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not os.path.exists(found) or subprocess.run([found, "-c", version]).returncode:
        pytest.skip("needs a Python 3.11 or later that every user may run, in /usr/bin")
    return found


def _decider(program: list[Instruction], arch: int) -> Callable[..., str | int]:
    """What the filter says of a call: ``allow``, ``kill`` or the error that it returns."""

    def decide(number: int | None, *arguments: int) -> str | int:
        assert number is not None
        padded = [*arguments, 0, 0, 0, 0, 0, 0]
        fields = {0: number, 4: arch, **{16 + 8 * index: value for index, value in enumerate(padded)}}
        accumulator, position = 0, 0
        while True:
            code, true, false, k = program[position]
            position += 1
            if code == 0x06:
                return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(k, k & 0xFFFF)
            if code == 0x20:
                accumulator = fields[k] & 0xFFFFFFFF
            else:
                holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
                position += true if holds else false

    return decide
