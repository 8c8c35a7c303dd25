"""For scripts of users alone: files that data preparation makes and copies (upstream: ``verl.utils.hdfs_io``)."""

from __future__ import annotations

import os
import shutil
from typing import Any


def exists(path: str, **kwargs: Any) -> bool:
    return os.path.exists(_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Makes a folder and its parents."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copies a file, or a folder into one that may be there; the path of the copy."""
    src, dst = _local(src), _local(dst)
    return str(shutil.copytree(src, dst, dirs_exist_ok=True) if os.path.isdir(src) else shutil.copy(src, dst))


def _local(path: str) -> str:
    if str(path).startswith("hdfs://"):
        raise ValueError(f"{path}: HDFS is not reached from here; give a local path, and copy it by hdfs dfs")
    return path
