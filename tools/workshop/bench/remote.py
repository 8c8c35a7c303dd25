"""Engines in processes of their own, each with the interpreter of its environment, which answer over pipes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from third_party.jemalloc import find_library
from tools.launch.ray_node import KEPT_MEMORY, WAITING_THREADS

ROOT = Path(__file__).resolve().parents[3]
ANSWER_TIMEOUT_S = 1800


@dataclass(frozen=True)
class EngineSpec:
    """One engine and how its process is started; ``is_ours``: it imports this repository."""

    engine: str
    options: Mapping[str, Any]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False


class EngineError(RuntimeError):
    """An engine's process ended or did not answer; the message ends with what it wrote last."""


class EngineProcess(AbstractContextManager["EngineProcess"]):
    """Starts ``program`` of ``engines`` and waits until it is ready: ``start_seconds`` from the beginning.

    Args:
        cpus: the CPUs that the process may use; it gets as many threads.
        scratch: its working directory, and where its log is.
    """

    def __init__(self, program: str, spec: EngineSpec, cpus: list[int], scratch: Path) -> None:
        self.spec = spec
        self._log = scratch / f"{spec.engine}.log"
        script = ROOT / "tools" / "workshop" / "bench" / "engines" / program
        options = {"engine": spec.engine, "cpus": cpus, "threads": len(cpus), **spec.options}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [spec.python, str(script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=scratch,
                env=_environment(spec, len(cpus)),
            )
        started = time.perf_counter()
        try:
            self.name: str = self._answer()["name"]
        except BaseException:
            self.end()
            raise
        self.start_seconds = time.perf_counter() - started

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The engine's answer; EngineError when it fails or does not answer in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error("ended") from None
        return self._answer()

    def end(self) -> None:
        """Stop the process, first with SIGTERM; a second call does nothing."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise self._error(f"did not answer within {ANSWER_TIMEOUT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._error("ended")
        return json.loads(line)

    def _error(self, what: str) -> EngineError:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return EngineError(f"{self.spec.engine} {what}; the end of {self._log}:\n{tail}")


def quickest_variant(
    specs: Mapping[str, EngineSpec],
    start: Callable[[EngineSpec], EngineProcess],
    seconds_of: Callable[[EngineProcess], float],
) -> EngineSpec:
    """The variant that takes the least seconds; EngineError when none runs.

    Each is tried in a process of its own, so that its memory is free again. A single variant is not tried.
    """
    if len(specs) == 1:
        return next(iter(specs.values()))
    seconds: dict[str, float] = {}
    failures: list[str] = []
    for variant, spec in specs.items():
        try:
            with start(spec) as process:
                seconds[variant] = seconds_of(process)
                report_progress(f"trial of {process.name}: {seconds[variant]:.2f} s")
        except EngineError as error:
            failures.append(f"{variant}: {error}")
            report_progress(f"trial of {spec.engine} {failures[-1]}")
    if not seconds:
        raise EngineError("\n".join(failures))
    return specs[min(seconds, key=seconds.__getitem__)]


def report_progress(line: str) -> None:
    """Print a line beside the results, on standard error."""
    print(line, file=sys.stderr, flush=True)


def cpus_for(num_threads: int) -> list[int]:
    """The first CPUs that this process may use, one for each thread."""
    return sorted(os.sched_getaffinity(0))[:num_threads]


class OthersLoad:
    """How many cores other processes used since this object was made, without the caller's own CPU seconds."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _busy_seconds()

    def cores(self, own_cpu_seconds: float) -> float:
        busy = _busy_seconds() - self._busy - own_cpu_seconds
        return max(0.0, busy / (time.perf_counter() - self._start))


def _busy_seconds() -> float:
    """CPU seconds of the whole machine since it booted."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def allocator_name() -> str:
    """The name of all engines' allocator: jemalloc where it is installed.

    Either keeps what is freed: a training step allocates and frees gigabytes, and page faults would be a fifth of it.
    """
    return "the system's" if find_library() is None else "jemalloc"


def _environment(spec: EngineSpec, num_threads: int) -> dict[str, str]:
    """This process's, with equal threads and allocator for all, and no way to the network."""
    environment = WAITING_THREADS | {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    if (library := find_library()) is not None:
        environment["LD_PRELOAD"] = ":".join(filter(None, [str(library), environment.get("LD_PRELOAD", "")]))
        environment["MALLOC_CONF"] = "thp:always,dirty_decay_ms:-1"
    else:
        environment |= KEPT_MEMORY
    if spec.is_ours:
        environment["PYTHONPATH"] = str(ROOT)
    return environment | dict(spec.environment)
