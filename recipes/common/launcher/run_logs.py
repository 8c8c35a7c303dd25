"""A run's logs: a folder per attempt, ``latest`` as a link to the newest, and Ray's files under the names of ranks.

logs/latest -> attempt_3
logs/attempt_3/<stage>.log, main_ppo.log      output of each stage and of the driver
logs/attempt_3/ray_start_<address>.log        ``ray start`` of a node
logs/attempt_3/ray_<address>/                 Ray's own files of a node: a link while it runs, a copy afterwards
logs/attempt_3/rank_<N>.log                   log of a rank's code
logs/attempt_3/rank_<N>.{out,err}             all other output of its process: links into Ray's files
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

LATEST = "latest"
_RANK = re.compile(r":actor_name:rank (\d+)")  # Ray writes an actor's repr into its files when it starts
_HEAD_BYTES = 1000


def new_attempt(logs: Path) -> Path:
    """Make the folder of the next attempt and point ``latest`` at it."""
    folder = next_folder(logs, "attempt_")
    _point(logs / LATEST, Path(folder.name))
    return folder


def next_folder(parent: Path, prefix: str = "") -> Path:
    """Make the folder of the next number, from 1, in ``parent``."""
    names = [path.name.removeprefix(prefix) for path in parent.glob(f"{prefix}*")]
    folder = parent / f"{prefix}{max((int(name) for name in names if name.isdigit()), default=0) + 1}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def attempt_of_worker(logs: Path, address: str) -> Path:
    """The attempt that the head has started on the shared disk; a new one where this node has a disk of its own."""
    latest = logs / LATEST
    if latest.is_dir() and not start_log(latest, address).exists():
        return logs / os.readlink(latest)
    return new_attempt(logs)


def start_log(attempt: Path, address: str) -> Path:
    """The file of what ``ray start`` prints on a node; an attempt has it once that node takes part."""
    return attempt / f"ray_start_{address}.log"


def show_session(session_logs: Path, kept: Path) -> None:
    """Make ``kept`` a link to Ray's files, for as long as Ray runs."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    _point(kept, session_logs)


def keep_session(kept: Path) -> None:
    """Turn a link that ``show_session`` made into a copy, once Ray has ended, and name the files of ranks."""
    if not kept.is_symlink():
        return
    source = kept.resolve()
    kept.unlink()
    if not source.is_dir():
        return  # Ray ended before it wrote anything, or another launcher has removed its temporary folder
    shutil.copytree(source, kept, ignore=_sockets, ignore_dangling_symlinks=True)
    for path in sorted(kept.glob("worker-*"), key=lambda path: path.stat().st_mtime):  # the last process of a rank
        with path.open("rb") as log:
            match = _RANK.search(log.read(_HEAD_BYTES).decode(errors="replace"))
        if match:
            _point(kept.parent / f"rank_{match[1]}{path.suffix}", path.relative_to(kept.parent))


def keep_earlier_sessions(logs: Path, address: str) -> None:
    """Copy what Ray wrote on this node in attempts whose launcher was killed, before Ray's folders are removed."""
    for attempt in logs.glob("attempt_*"):
        keep_session(attempt / f"ray_{address}")


def _point(link: Path, target: Path) -> None:
    """Make or replace a symbolic link in one step."""
    temporary = link.with_name(f".{link.name}.tmp{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)


def _sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not os.path.isfile(os.path.join(folder, name)) and "socket" in name]
