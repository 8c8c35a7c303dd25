"""Rights that a process can give up by itself: shared namespaces, capabilities, outliving its parent, files (Landlock).

Landlock lets a process read what is beneath a few folders and write nothing (Linux 5.13 and later).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

from .syscalls import NUMBERS

TYPE_CHECKING = False  # as typing's, whose import takes 3 ms
if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_SECBITS_NO_ROOT_LOCKED = 0b1111  # root by number alone gets no capability back, and this cannot be undone
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x04000000, 0x08000000, 0x10000000, 0x40000000

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


def end_with(parent: int) -> None:
    """The kernel kills this process when its parent ends; if that has happened already, ends it now."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave_namespaces() -> bool:
    """Moves this process into an empty network and namespaces of its own for users and IPC; False where not allowed."""
    return _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS) == 0


def drop_capabilities() -> bool:
    """Gives up every capability for ever; True when none is left. Without root there are none to give up."""
    libc = _libc()
    libc.prctl(_PR_SET_SECUREBITS, _SECBITS_NO_ROOT_LOCKED, 0, 0, 0)  # needs CAP_SETPCAP; no_new_privs does as much
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # past the last one, or not permitted
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    return libc.capset(header, (ctypes.c_uint32 * 6)()) == 0


def forbid_new_privileges() -> None:
    """Nothing that this process starts can have more rights than it has; OSError when the kernel refuses."""
    _checked(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def restrict_files(readable: Sequence[str]) -> int:
    """From now on this process may open only what is beneath ``readable``, only to read, and no TCP port.

    Needs no_new_privs. Returns the kernel's version of the interface, 0 when it has none: then nothing has changed.
    Raises OSError when the kernel has it and refuses.
    """
    libc = _libc()
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


def _checked(result: int, what: str = "Landlock") -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
