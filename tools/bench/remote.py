"""Engines in processes of their own, each with the interpreter of its environment, which answer over pipes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.allocator import allocator_environment

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 1800


@dataclass(frozen=True)
class EngineSpec:
    """One engine and how its process is started; ``is_ours``: it imports this repository."""

    engine: str
    python: str
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False


class EngineError(RuntimeError):
    """An engine's process ended or did not answer; the message ends with what it wrote last."""


class EngineProcess:
    """Starts ``program`` of ``tools/bench/engines`` and waits until it is ready: ``start_seconds`` from the beginning.

    Args:
        cpus: the CPUs that the process may use; it gets as many threads.
        scratch: its working directory, and where its log is; caches of compilers are below it.
    """

    def __init__(self, program: str, spec: EngineSpec, cpus: list[int], scratch: Path) -> None:
        self.spec = spec
        self._log = scratch / f"{spec.engine}.log"
        script = ROOT / "tools" / "bench" / "engines" / program
        options = {"engine": spec.engine, "cpus": cpus, "threads": len(cpus), **spec.options}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [spec.python, str(script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=scratch,
                env=_environment(spec, len(cpus), scratch),
            )
        started = time.perf_counter()
        try:
            self.name: str = self._answer()["name"]
        except BaseException:
            self.end()
            raise
        self.start_seconds = time.perf_counter() - started

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
        """Stops the process, kindly at first."""
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


def cpus_for(num_threads: int) -> list[int]:
    """The first CPUs that this process may use; ValueError when there are fewer than threads."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < num_threads:
        raise ValueError(f"--threads {num_threads}: this process may use {len(cpus)} CPUs; give at most as many")
    return cpus[:num_threads]


class OthersLoad:
    """How many cores other processes used since this object was made, without the caller's own CPU seconds."""

    def __init__(self) -> None:
        self._start, self._busy = time.perf_counter(), _busy_seconds()

    def cores(self, own_cpu_seconds: float) -> float:
        busy = _busy_seconds() - self._busy - own_cpu_seconds
        return max(0.0, busy / (time.perf_counter() - self._start))


def _busy_seconds() -> float:
    """CPU seconds of the whole machine since it booted."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _environment(spec: EngineSpec, num_threads: int, scratch: Path) -> dict[str, str]:
    """This process's, with equal threads and allocator for all, no way to the network, and caches in ``scratch``."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache" / "inductor"),
        "TORCH_EXTENSIONS_DIR": str(scratch / "cache" / "extensions"),
        "TRITON_CACHE_DIR": str(scratch / "cache" / "triton"),
    }
    environment |= allocator_environment(environment)
    if spec.is_ours:
        environment["PYTHONPATH"] = str(ROOT)
    return environment | dict(spec.environment)


def this_python() -> str:
    """The interpreter of this process, for engines of this environment."""
    return sys.executable
