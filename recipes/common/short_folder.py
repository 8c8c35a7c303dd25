"""Folders with which Ray can work: short enough for Unix sockets (107 bytes), whatever TMPDIR is.

A session of Ray is a private folder in TMPDIR. Where that path is too long, or has characters that Ray's commands do
not take, a link in a short folder leads to it: the sockets are bound through the link, and every file is in TMPDIR.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

SOCKET_BYTES = 107  # sun_path of unix(7), without its final zero
RAY_BYTES = len("/session_2026-11-26_21-42-09_204942_1234567/sockets/plasma_store")
LISTENER_BYTES = len("/pymp-abcdefgh/listener-abcdefgh")  # of multiprocessing
PREFIX = "rl-"
_PARENT_BYTES = SOCKET_BYTES - RAY_BYTES - len(f"/{PREFIX}12345678/r")
_PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")
_NOT_FOR_A_SHELL = re.compile(r"""[\s'"\\$`;&|<>()*?]""")
_OWN_NAME = re.compile(PREFIX + "[0-9a-f]{8}")  # what _locked_folder gives, so that no folder of anybody's is removed


class SessionFolder:
    """A new private folder for Ray's session; ``path`` is the short way to it.

    It is locked for as long as this process lives. The lock, unlike a process id, holds between containers that share
    the folder, so that none removes what another one uses.

    Raises:
        ValueError: no folder for temporary files can be used.
    """

    def __init__(self) -> None:
        parent = temporary_folder()
        for each in {parent, *_candidates()}:
            _remove_leftovers(each)
        self._locks: list[int] = []
        self._folders: list[Path] = []
        files = self._locked_folder(parent)
        self.path = files
        if len(os.fsencode(files)) + RAY_BYTES > SOCKET_BYTES or not _PLAIN.fullmatch(str(files)):
            self.path = self._locked_folder(short_parent()) / "r"
            self.path.symlink_to(files)

    def _locked_folder(self, parent: Path) -> Path:
        # Locked under a name that nobody looks for: under its own name, another launcher might take it for a leftover.
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
        descriptor = os.open(hidden, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: there, nothing is taken for a leftover
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = parent / f"{PREFIX}{secrets.token_hex(4)}"
        hidden.rename(folder)
        self._locks.append(descriptor)
        self._folders.append(folder)
        return folder

    def remove(self) -> None:
        """Remove everything; call it once Ray has ended."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())


def environment_problem(prefix: str = sys.prefix) -> str | None:
    """Why Ray cannot start from this environment, which SETUP=no takes as it is; set-up refuses to make such a one."""
    if _NOT_FOR_A_SHELL.search(prefix) is None:
        return None
    return (
        f"VENV_DIR is {prefix}, which has a space or another character of the shell in its path, and Ray cannot start "
        "from such an environment: name one in a folder without it"
    )


def folder_problem() -> str | None:
    """Why no session could have its folder here, with the remedy; None when one can."""
    try:
        files = temporary_folder() / f"{PREFIX}12345678"
        if len(os.fsencode(files)) + RAY_BYTES > SOCKET_BYTES or not _PLAIN.fullmatch(str(files)):
            short_parent()
    except ValueError as error:
        return str(error)
    return None


def temporary_folder() -> Path:
    """The folder of temporary files; ValueError where TMPDIR names none, which Python would pass over in silence."""
    given = os.environ.get("TMPDIR")
    if given and not (os.path.isdir(given) and os.access(given, os.W_OK | os.X_OK)):
        raise ValueError(f"TMPDIR is {given!r}; expected a folder that you can write to: make it, or unset TMPDIR")
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ValueError(f"{error.strerror}; set TMPDIR to a folder that you can write to") from None


def short_parent() -> Path:
    """A folder with a short path in which this user alone can make and remove its own; ValueError without one."""
    for folder in _candidates():
        if len(os.fsencode(folder)) <= _PARENT_BYTES and _PLAIN.fullmatch(str(folder)) and _is_safe(folder):
            return folder
    tried = ", ".join(map(str, _candidates()))
    raise ValueError(
        f"Unix sockets need a folder whose path has at most {_PARENT_BYTES} plain characters, and none of {tried} is "
        "one that you can write to and others cannot change: set TMPDIR, or XDG_RUNTIME_DIR, to such a folder"
    )


def start_method() -> Literal["forkserver", "spawn"]:
    """How multiprocessing starts processes here: by a fork server, whose socket is in TMPDIR, where that path fits."""
    fits = len(os.fsencode(tempfile.gettempdir())) + LISTENER_BYTES <= SOCKET_BYTES
    return "forkserver" if fits else "spawn"


def _candidates() -> list[Path]:
    own = [os.environ[name] for name in ("TMPDIR", "XDG_RUNTIME_DIR") if os.environ.get(name)]
    return [Path(folder).absolute() for folder in (*own, "/tmp", "/dev/shm", "/var/tmp")]


def _is_safe(folder: Path) -> bool:
    """Whether we can make folders there that nobody else can rename: it is sticky, or only its owner writes there."""
    try:
        status = folder.stat()
    except OSError:
        return False
    is_shared = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    is_kept = bool(status.st_mode & stat.S_ISVTX) if is_shared else status.st_uid in (0, os.getuid())
    return stat.S_ISDIR(status.st_mode) and is_kept and os.access(folder, os.W_OK | os.X_OK)


def _remove_leftovers(parent: Path) -> None:
    """Remove this user's folders whose process, anywhere on this host, is gone: their locks can be taken."""
    for folder in _own_folders(parent):
        with suppress(OSError):  # another launcher removes it, or it is locked
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _own_folders(parent: Path) -> Iterator[Path]:
    try:
        found = sorted(path for path in parent.glob(f"{PREFIX}*") if _OWN_NAME.fullmatch(path.name))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ENOENT):
            raise
        return
    for folder in found:
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid():
                yield folder
