"""Libraries compiled for this processor at first use: built once for all processes, then kept in the user's cache."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hf_formats.cache_folder import cache_folder, loads_libraries
from hf_formats.files import try_remove

_VERSION_LIMIT_S = 10
_SCRATCH = "build-"


@dataclass(frozen=True)
class NativeBuild:
    """A library and how it is made.

    Attributes:
        what: what needs it, for errors.
        compiler: the program with its first arguments, see ``compiler_of``.
        facts: what else decides whether a kept library fits, such as the processor's instructions.
        advice: what a user can do when it cannot be built.
        limit_s: a compiler that takes longer is ended; as long a process waits for another one that builds.
    """

    what: str
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    sources: tuple[Path, ...]
    folder: str
    advice: str
    headers: tuple[Path, ...] = ()
    libraries: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    limit_s: float = 900

    def load(self) -> ctypes.CDLL:
        """Return the loaded library; RuntimeError when there is no compiler or it does not make one in time."""
        problem: OSError | None = None
        for _ in range(2):  # a kept file may be damaged: it is made again, once
            path = self.path()
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                problem = error
                if not loads_libraries(path.parent):
                    raise RuntimeError(
                        f"{path.parent} is on a file system from which no library may be loaded (noexec): name another "
                        "cache folder in XDG_CACHE_HOME"
                    ) from error
                try_remove(path)
        raise RuntimeError(f"what {self.compiler[0]} makes of {self._place} is no library ({problem}); {self.advice}")

    def path(self) -> Path:
        """Return the library's file, built when it is not there yet; RuntimeError as ``load``."""
        if not has_program(self.compiler):
            raise RuntimeError(
                f"{self.what} need a compiler, and {' '.join(self.compiler)!r} is not found: {self.advice}"
            )
        folder = cache_folder() / "r1-zero-ascend" / self.folder
        target = folder / f"kernels-{self._fingerprint()}.so"
        if target.is_file():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _one_builder(folder, self.limit_s) as is_alone:
            if target.is_file():
                return target
            for left in folder.glob(f"{_SCRATCH}*") if is_alone else ():  # of builders that were killed
                try_remove(left)
            # Built beside its place and moved there: no process loads half a file.
            with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH, ignore_cleanup_errors=True) as scratch:
                built = self._build(Path(scratch))
                with built.open("rb") as file:
                    os.fsync(file.fileno())  # loading a library that was cut would end the process
                os.replace(built, target)
        return target

    def _build(self, scratch: Path) -> Path:
        deadline = time.monotonic() + self.limit_s
        command = [*self.compiler, *self.flags]
        objects = [scratch / f"{source.stem}.o" for source in self.sources]
        with ThreadPoolExecutor() as pool:  # each waits for a compiler
            made = zip(self.sources, objects, strict=True)
            list(pool.map(lambda one: self._run([*command, "-c", str(one[0]), "-o", str(one[1])], deadline), made))
        built = scratch / "kernels.so"
        self._run([*command, "-shared", *map(str, objects), *self.libraries, "-o", str(built)], deadline)
        if not built.is_file():
            raise RuntimeError(f"{command[0]} makes no file of {self._place}; {self.advice}")
        return built

    def _run(self, command: list[str], deadline: float) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            said = process.communicate(timeout=max(0.0, deadline - time.monotonic()))[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{command[0]} has not built {self._place} in {self.limit_s:g} s and was ended; {self.advice}"
            ) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
                process.wait()
        if process.returncode != 0:
            raise RuntimeError(f"{command[0]} cannot build {self._place}; {self.advice}. It said:\n{said[-2000:]}")

    @property
    def _place(self) -> Path:
        return self.sources[0].parent

    def _fingerprint(self) -> str:
        """Libraries are kept by what is in the files, wherever these are, and by the compiler's version."""
        digest = hashlib.sha256(repr((self.compiler, self.flags, self.libraries, self.facts)).encode())
        with suppress(OSError, subprocess.TimeoutExpired):
            command = [*self.compiler, "-dumpfullversion"]
            digest.update(subprocess.run(command, capture_output=True, timeout=_VERSION_LIMIT_S).stdout)
        for file in (*self.sources, *self.headers):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:20]


def compiler_of(variable: str, default: str) -> tuple[str, ...]:
    """Return the compiler that an environment variable names: a program, or one with arguments ("ccache gcc")."""
    given = os.environ.get(variable) or default
    if shutil.which(given):  # also of a path with spaces
        return (given,)
    with suppress(ValueError):  # a quote that does not end
        return tuple(shlex.split(given)) or (default,)
    return (given,)


def has_program(command: tuple[str, ...]) -> bool:
    """Whether the program of a command is there."""
    return bool(command) and shutil.which(command[0]) is not None


@contextmanager
def _one_builder(folder: Path, limit_s: float) -> Iterator[bool]:
    """Wait for a process that builds in this folder, at most ``limit_s``; yields whether no other one builds.

    Ranks that start together would all build the same. On a file system without locks they do, and the last one's
    library stays.
    """
    deadline = time.monotonic() + limit_s
    with (folder / "building").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                yield False
            except OSError:
                yield False
            else:
                yield True
            return
