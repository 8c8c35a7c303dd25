"""The limits of a submitted program, and its result."""

from __future__ import annotations

from dataclasses import dataclass


class SandboxError(RuntimeError):
    """Programs cannot be run safely on this machine; the message says what is missing."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Attributes:
        wall_s, cpu_s: seconds until it is killed; ``cpu_s`` in whole seconds, over all its threads and the
            interpreter's start.
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
            met: ``timeout``, ``output``, ``threads``.
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
        """True when it ended by itself, without an error."""
        return self.status == "ok"
