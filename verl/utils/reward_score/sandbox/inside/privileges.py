"""Rights that a process can give up by itself: shared namespaces, capabilities, outliving its parent, files.

Landlock lets a process read what is beneath a few folders and write nothing (Linux 5.13 and later). Without it a root
directory of the process's own has these folders and nothing else, where users may make namespaces.
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
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}.get(os.uname().machine, -1)
_NEW_ROOT = "/tmp"  # a folder that is there; only this process sees what covers it
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


def enter_own_root(readable: Sequence[str], uid: int, gid: int) -> bool:
    """Makes a root directory that has only ``readable``; False where not allowed.

    Needs ``leave_namespaces``; ``uid`` and ``gid`` are the process's from before that.
    """
    libc = _libc()
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        _checked(libc.unshare(_CLONE_NEWNS), "mount namespace")
        _mount(libc, "none", "/", None, _MS_REC | _MS_PRIVATE)
        # Opened before the new root covers a folder; what lies in another one of them is there with it.
        folders = [path for path in readable if os.path.exists(path)]
        folders = [path for path in folders if not any(path.startswith(f"{other}/") for other in folders)]
        sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in folders]
        _mount(libc, "none", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV)
        for path, descriptor in sources:
            _show(libc, path, descriptor)
        os.chdir(_NEW_ROOT)
        _checked(libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
        _checked(libc.umount2(b".", _MNT_DETACH), "umount2")
        os.chdir("/")
    except OSError:
        return False
    return True


def _show(libc: ctypes.CDLL, path: str, descriptor: int) -> None:
    """Binds what ``descriptor`` is of to the same path beneath the new root, and closes it."""
    target = _NEW_ROOT + path
    source = f"/proc/self/fd/{descriptor}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
    _mount(libc, source, target, None, _MS_BIND | _MS_REC)
    os.close(descriptor)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int) -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(libc.mount(*given, ctypes.c_ulong(flags), None), f"mount {target}")


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
