"""For plug-ins alone: paths here and in HDFS, by the command ``hdfs dfs`` (upstream: ``verl.utils.hdfs_io``)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

_PREFIX = "hdfs://"


def exists(path: str, **kwargs: Any) -> bool:
    """Whether a file or a folder is there."""
    if _is_remote(path):
        return _hdfs("-test", "-e", path).returncode == 0
    return os.path.exists(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Makes a folder and its parents; FileExistsError as ``os.makedirs`` (HDFS takes no ``mode``)."""
    if not _is_remote(name):
        os.makedirs(name, mode=mode, exist_ok=exist_ok)
        return
    if not exist_ok and exists(name):
        raise FileExistsError(f"{name} exists")
    _done(_hdfs("-mkdir", "-p", name), f"making {name}")


def copy(src: str, dst: str, **kwargs: Any) -> str | bool:
    """Copies a file or a folder: here as ``shutil`` does, to, from and within HDFS by ``hdfs dfs``.

    Returns:
        The path of the copy here; True for a copy that HDFS takes part in.

    Raises:
        OSError: the copy failed.
    """
    if not _is_remote(src) and not _is_remote(dst):
        if Path(src).is_dir():
            return str(shutil.copytree(src, dst, **kwargs))
        return str(shutil.copy(src, dst, **kwargs))
    verb = "-cp" if _is_remote(src) and _is_remote(dst) else "-get" if _is_remote(src) else "-put"
    _done(_hdfs(verb, "-f", src, dst), f"copying {src} to {dst}")
    return True


def _is_remote(path: str) -> bool:
    return path.startswith(_PREFIX)


def _hdfs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of ``hdfs dfs ARGUMENTS``; ValueError when there is no such command."""
    command = shutil.which("hdfs")
    if command is None:
        raise ValueError(
            f"hdfs dfs {' '.join(arguments)}: the command hdfs is not on PATH; install a Hadoop client, or give a "
            "local path"
        )
    return subprocess.run([command, "dfs", *arguments], capture_output=True, text=True, check=False)


def _done(ended: subprocess.CompletedProcess[str], what: str) -> None:
    if ended.returncode:
        raise OSError(f"{what} failed: {ended.stderr.strip() or f'exit code {ended.returncode}'}")
