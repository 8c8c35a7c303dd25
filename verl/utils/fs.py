"""For plug-ins alone: the path of a file that a data set reads (upstream: ``verl.utils.fs``)."""

from __future__ import annotations

from typing import Any


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """``src``, which is used where it lies, whatever is said of copies; ValueError for a path in HDFS."""
    if src.startswith("hdfs://"):
        raise ValueError(f"{src}: fetch it first (hdfs dfs -get) and give the local path")
    return src
