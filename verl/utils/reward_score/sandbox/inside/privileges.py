"""Rights that a process can give up by itself: shared namespaces, every capability, outliving its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_SECBITS_NO_ROOT_LOCKED = 0b1111  # root by number alone gets no capability back, and this cannot be undone
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x04000000, 0x08000000, 0x10000000, 0x40000000


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
    libc = _libc()
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"no_new_privs: {os.strerror(code)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
