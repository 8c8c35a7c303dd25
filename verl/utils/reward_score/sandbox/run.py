"""Run a submitted Python program in a sandbox; refuse to on a machine whose kernel cannot enforce it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

START_S = 10.0  # for an interpreter to start and give up its rights, before the program's time begins
MAY_READ = "VERL_SANDBOX_MAY_READ"  # 1: programs run although the machine cannot keep them from reading files
_READS = "it can read other files"
_POLL_S = 0.01  # how often its threads are counted
_CHUNK = 1 << 16
_NUM_THREADS = 17  # of /proc/N/stat, counted from behind the command's name
_FOLDER = str(Path(__file__).resolve().parent)
_BOOT = "from inside.jail import main; main()"
_FILES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache",
          "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")  # fmt: skip
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LANG": "C.UTF-8",
    "PYTHONPATH": _FOLDER,  # until the program starts
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8:replace",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


logger = logging.getLogger(__name__)


class SandboxError(RuntimeError):
    """Programs cannot be run safely on this machine; the message says what is missing."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Attributes:
        wall_s, cpu_s: seconds until it is killed; ``cpu_s`` in whole seconds, over all its threads and the
            interpreter's start; a program that ignores the signal has one second more.
        memory_bytes: address space, the interpreter's own 30 MB and every thread's stack among it.
        output_bytes: of standard output, and of standard error.
        threads: of the one process that it is; more, and it is killed.
        open_files: file descriptors.
    """

    wall_s: float = 4.0
    cpu_s: int = 4
    memory_bytes: int = 1 << 30
    output_bytes: int = 8 << 20
    threads: int = 64
    open_files: int = 64


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        status: ``ok`` (ended with exit code 0, and its assertions held if it had any), ``failed``, or the limit that it
            met: ``timeout`` (of either clock), ``output``, ``threads``.
        stdout, stderr: what it wrote, up to the limits; bytes that are no UTF-8 replaced.
        exit_code: minus the signal when one ended it.
        seconds: wall clock, from its beginning.
    """

    status: str
    stdout: str
    stderr: str
    exit_code: int
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def run_program(
    program: str, stdin: str = "", *, tests: str | None = None, limits: SandboxLimits | None = None
) -> ProgramResult:
    """Runs ``program`` as ``__main__`` on ``stdin``, or imports it and runs ``tests`` in its scope.

    The program gets no network, no file to write, no second process, the limits' share of time and memory, and nothing
    to read but Python's own files. Its standard library and the installed
    packages are there. With ``tests`` it shares its process with them, so a program made for it can fool them; one that
    is compared by its output cannot, because the expected output is never there.

    Raises:
        SandboxError: this machine cannot keep a program from the network, from writing, or within its limits; or the
            program's process did not come so far as to begin.
    """
    expected = sandbox_layers()
    limits = limits or SandboxLimits()
    result, layers = _run(program, stdin, tests, limits)
    if not layers:
        why = f" within {START_S:g} s" if result.status == "timeout" else f": {_last_line(result)}"
        raise SandboxError(f"the process of a program did not start{why}")
    if layers != expected:
        raise SandboxError(f"a program ran under {', '.join(layers)}; this machine has offered {', '.join(expected)}")
    return result


def missing_protection() -> str:
    """Why programs cannot be run safely here, by trying what they must not do; empty when they can."""
    try:
        sandbox_layers()
    except SandboxError as error:
        return str(error)
    return ""


@cache  # of a success: where the sandbox does not hold, the next call tries again
def sandbox_layers() -> tuple[str, ...]:
    """The kernel's protections that programs are under on this machine; SandboxError when they do not hold."""
    where = "the sandbox for submitted programs does not"
    probe = os.path.join(tempfile.gettempdir(), f"sandbox-probe-{os.getpid()}")
    with tempfile.NamedTemporaryFile(prefix="sandbox-probe-") as secret:
        program = _PROBE.format(parent=os.getpid(), probe=probe, secret=secret.name, reads=_READS)
        result, layers = _run(program, "", None, SandboxLimits(wall_s=30.0, cpu_s=10))
    if not layers:
        raise SandboxError(f"{where} start on this machine: {_last_line(result)}")
    leaks = result.stdout.split("\n")[:-1]
    if _READS in leaks and os.environ.get(MAY_READ) == "1":
        leaks.remove(_READS)
        logger.warning(
            "submitted programs can read every file that this user can, the expected outputs among them (%s=1)",
            MAY_READ,
        )
    if leaks or not result.is_ok:
        raise SandboxError(
            f"{where} hold on this machine: {'; '.join(leaks) or _last_line(result)}. It has {', '.join(layers)}; it "
            "needs seccomp, and Landlock (Linux 5.13) or user namespaces (sysctl user.max_user_namespaces, and a "
            f"container that allows them) against reading; with {MAY_READ}=1 programs may read"
        )
    return layers


def _last_line(result: ProgramResult) -> str:
    return (result.stderr.strip().splitlines() or [f"{result.status}, exit code {result.exit_code}"])[-1]


# Tried in the sandbox, once by each process that runs programs; it prints what it should not have been able to do.
_PROBE = """
import ctypes, os, resource, signal, socket

def must_fail(what, function):
    try:
        function()
    except (OSError, MemoryError, ValueError):
        return
    print(what)

must_fail("it can open a socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
must_fail({reads!r}, lambda: open({secret!r}).close())
must_fail("it can write files", lambda: (open({probe!r}, "w"), os.unlink({probe!r})))
must_fail("it can make folders", lambda: (os.mkdir({probe!r}), os.rmdir({probe!r})))
must_fail("it can start processes", lambda: os._exit(0) if os.fork() == 0 else None)
must_fail("it can send signals to its parent", lambda: os.kill({parent}, 0))
must_fail("it can read its parent's environment", lambda: open("/proc/{parent}/environ", "rb").read(1))
must_fail("it can use more memory than its limit", lambda: bytearray(resource.getrlimit(resource.RLIMIT_AS)[0]))
must_fail("it can raise its limits", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
"""


def _environment() -> dict[str, str]:
    """All that a program's process gets: of this process's variables only where the interpreter's own libraries are."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return _ENVIRONMENT if libraries is None else {**_ENVIRONMENT, "LD_LIBRARY_PATH": libraries}


def _settings(tests: str | None, limits: SandboxLimits, control: int, report: int) -> dict[str, Any]:
    packages = list(dict.fromkeys([*site.getsitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]))
    library = [sysconfig.get_path("stdlib"), *(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))]
    return {
        "parent": os.getpid(),
        "control": control,
        "report": report,
        "has_tests": tests is not None,
        "readable": list(dict.fromkeys([*_FILES, *library, *packages])),
        "packages": packages,
        "own_path": _FOLDER,
        "limits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }


def _run(program: str, stdin: str, tests: str | None, limits: SandboxLimits) -> tuple[ProgramResult, tuple[str, ...]]:
    """The result, and the layers that the process says it is under: none when it did not come so far."""
    word = secrets.token_hex(16)
    frames = json.dumps(program) + "\n"
    if tests is not None:
        frames += json.dumps({"code": tests, "word": word}) + "\n"
    control_end, control_fd = os.pipe()
    report_fd, report_end = os.pipe()
    with open(control_fd, "wb", buffering=0) as control, open(report_fd, "rb", buffering=0) as report:
        settings = json.dumps(_settings(tests, limits, control_end, report_end))
        try:
            process = subprocess.Popen(
                [sys.executable, "-S", "-s", "-P", "-B", "-c", _BOOT, settings],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                pass_fds=(control_end, report_end),
            )
        finally:  # from now on the program's end is the end of its streams
            os.close(control_end)
            os.close(report_end)
        outputs: Any = (report, process.stdout, process.stderr)
        received = {pipe: bytearray() for pipe in outputs}
        unsent: Any = {control: memoryview(frames.encode()), process.stdin: memoryview(stdin.encode(errors="replace"))}
        with process:
            try:
                status, began_at = _serve(process, unsent, received, report, limits)
            finally:
                process.kill()  # its only process: it cannot start another
    reported, stdout, stderr = (bytes(received[pipe]) for pipe in outputs)
    first, _, rest = reported.partition(b"\n")
    layers = tuple(json.loads(first)["layers"]) if first.startswith(b'{"layers"') else ()
    if process.returncode == -signal.SIGXCPU:
        status = "timeout"
    elif status == "ok" and (process.returncode != 0 or (tests is not None and rest != word.encode())):
        status = "failed"
    result = ProgramResult(
        status,
        stdout.decode(errors="replace"),
        stderr.decode(errors="replace"),
        process.returncode,
        time.monotonic() - began_at if began_at else 0.0,
    )
    return result, layers


def _serve(
    process: subprocess.Popen[bytes],
    unsent: dict[FileIO, memoryview],
    received: dict[FileIO, bytearray],
    report: FileIO,
    limits: SandboxLimits,
) -> tuple[str, float | None]:
    """Moves bytes through all pipes at once until the program has ended or met a limit, so that no full pipe blocks.

    Waits for the program's streams and its end; unblocked in any case by the limits of the interpreter's start and of
    the program, whose clock begins with the first line of ``report``.

    Returns:
        ``ok`` or the limit's name, and the time at which the program began, None when it did not.
    """
    began_at, deadline = None, time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        for pipe in (*unsent, *received):
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE if pipe in unsent else selectors.EVENT_READ)
        while time.monotonic() < deadline:
            for key, _ in selector.select(_POLL_S):
                ready: Any = key.fileobj
                is_open = _send(ready, unsent) if ready in unsent else _receive(ready, received)
                if not is_open:
                    selector.unregister(ready)
                    ready.close()
            if began_at is None and b"\n" in received[report]:
                began_at = time.monotonic()
                deadline = began_at + limits.wall_s
            if max(map(len, received.values())) > limits.output_bytes:
                return "output", began_at
            if process.poll() is None:
                if _num_threads(process.pid) > limits.threads:
                    return "threads", began_at
            elif all(pipe.closed for pipe in received):
                return "ok", began_at
    return "timeout", began_at


def _send(pipe: FileIO, unsent: dict[FileIO, memoryview]) -> bool:
    """Sends a part; False when nothing is left."""
    try:
        unsent[pipe] = unsent[pipe][os.write(pipe.fileno(), unsent[pipe][:_CHUNK]) :]
    except BrokenPipeError:  # the program does not read it
        return False
    return bool(unsent[pipe])


def _receive(pipe: FileIO, received: dict[FileIO, bytearray]) -> bool:
    """Receives a part; False when the program has closed its end."""
    chunk = os.read(pipe.fileno(), _CHUNK)
    received[pipe] += chunk
    return bool(chunk)


def _num_threads(pid: int) -> int:
    """Threads of a process; 0 when it has just ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[_NUM_THREADS])
