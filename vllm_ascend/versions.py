"""The versions of this machine's Ascend software, as its packages report them, and which of them graphs need.

The doctor reads them too, also where torch is missing, so this file imports nothing of it.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

CANN_FOLDERS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest", "/usr/local/Ascend/cann")
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")
# Attention in a captured step: its lengths change by an update of its task, which A3 has from here on.
NEEDED_BY_GRAPHS = {"CANN": "8.3.RC1", "torch_npu": "2.7.1", "driver": "25.0.RC1"}
DRIVER_WITH_STREAMS = "25.5.1"  # below it a device runs out of streams after fewer captures


def cann_version() -> str | None:
    """The CANN toolkit's version, from the folder in its environment variable or from the usual ones."""
    folders = [Path(folder) for folder in (os.environ.get("ASCEND_HOME_PATH"), *CANN_FOLDERS) if folder]
    files = (path for folder in folders for path in sorted(folder.glob("*-linux/ascend_toolkit_install.info")))
    return next(filter(None, map(_version_in, files)), None)


def driver_version() -> str | None:
    """The driver's version; None when its file is not mounted or has no version."""
    return _version_in(DRIVER_VERSION_FILE) if DRIVER_VERSION_FILE.is_file() else None


def torch_npu_version() -> str | None:
    """The version of the installed torch_npu; None without one."""
    try:
        return metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 8.2.RC1 is (8, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def graph_problem() -> str | None:
    """Why this machine's software captures no decode steps, with the versions found and needed; None when it does.

    A version that cannot be read counts as new enough: a container without the driver's file runs graphs as well.
    """
    found = {"CANN": cann_version(), "torch_npu": torch_npu_version(), "driver": driver_version()}
    old = [
        f"{name} {needed} or newer and found {found[name]}"
        for name, needed in NEEDED_BY_GRAPHS.items()
        if numbers(found[name] or needed) < numbers(needed)
    ]
    return f"graphs of decode steps need {', '.join(old)}" if old else None


def _version_in(file: Path) -> str | None:
    found = re.search(r"^version=(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE)
    return found[1].strip() if found else None
