"""Landlock: the kernel lets a process read what is beneath a few folders and write nothing (Linux 5.13 and later)."""

from __future__ import annotations

import ctypes
import os
import struct

from .syscalls import NUMBERS

TYPE_CHECKING = False  # as typing's, whose import takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Sequence

# The three calls have the same numbers on every machine.
_CREATE_RULESET = NUMBERS["landlock_create_ruleset"][0]
_ADD_RULE = NUMBERS["landlock_add_rule"][0]
_RESTRICT_SELF = NUMBERS["landlock_restrict_self"][0]
_QUERY_VERSION = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
# (version of the interface, rights on files that it knows, on TCP, on signals and abstract sockets), newest first.
_RIGHTS = (
    (6, (1 << 16) - 1, 0b11, 0b11),
    (5, (1 << 16) - 1, 0b11, 0),
    (4, (1 << 15) - 1, 0b11, 0),
    (3, (1 << 15) - 1, 0, 0),
    (2, (1 << 14) - 1, 0, 0),
    (1, (1 << 13) - 1, 0, 0),
)


def restrict_files(readable: Sequence[str]) -> int:
    """From now on this process may open only what is beneath ``readable``, only to read, and no TCP port.

    Needs no_new_privs. Returns the kernel's version of the interface, 0 when it has none: then nothing has changed.
    Raises OSError when the kernel has it and refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, _QUERY_VERSION)
    if version < 1:
        return 0
    _, files, ports, scopes = next(entry for entry in _RIGHTS if entry[0] <= version)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", files, ports, scopes)[:size]
    ruleset = _checked(libc.syscall(_CREATE_RULESET, attributes, size, 0))
    try:
        for path in readable:
            _allow_reading(libc, ruleset, path)
        _checked(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return int(version)


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    if not os.path.exists(path):
        return
    rights = _READ_FILE | _EXECUTE | (_READ_DIR if os.path.isdir(path) else 0)
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
