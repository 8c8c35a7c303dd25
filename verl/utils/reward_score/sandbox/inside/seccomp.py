"""The list of system calls that a submitted program has, as a filter that the kernel runs before each of them.

The filter is assembled here because the binding of libseccomp on PyPI, pyseccomp, has had no release since January 2021
and needs the system's libseccomp.so.2, which a user without root cannot install. The child that installs the filter
also runs without site-packages and is ready in milliseconds, which a ctypes binding that searches libraries is not.

Every call that is not listed fails with EPERM. The list is such that:

- no ``socket``, ``connect`` or ``bind``: no network, not even a local one (``socketpair`` has two ends in one process);
- files can be opened for reading only, and no call that makes, removes, renames or changes one is listed: no writes;
- ``clone`` only for threads, no ``fork``, ``execve`` or ``ptrace``: the program is one process for ever;
- signals and limits only for itself, no ``prctl``, no owner of a descriptor's signals (``F_SETOWN``).

``clone3`` and ``openat2`` pass their flags in memory, which a filter cannot read: they are "not implemented" here, and
the C library then uses the older call.
"""

from __future__ import annotations

import ctypes
import errno
import os

from .syscalls import NUMBERS

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # numbers of the 32-bit-pointer ABI on x86_64, which the same kernel may serve
_COLUMN = {"x86_64": 0, "aarch64": 1}

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16  # struct seccomp_data; all of it little-endian here

_CLONE_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
_IOCTL_REQUESTS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_AF_UNIX = 1
_SIGNAL_CALLS = ("kill", "tkill", "tgkill")
_NOT_IMPLEMENTED = ("clone3", "openat2")
_NOT_FOR_PROGRAMS = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def apply_filter() -> None:
    """Puts the filter on this process, for ever; OSError or ValueError when the kernel or the machine has none."""
    instructions = filter_for(os.uname().machine, os.getpid())
    packed = b"".join(
        code.to_bytes(2, "little") + bytes((true, false)) + k.to_bytes(4, "little")
        for code, true, false, k in instructions
    )
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({arguments[0]}): {os.strerror(code)}")


def filter_for(machine: str, pid: int) -> list[Instruction]:
    """The filter's instructions on a ``machine`` for the process ``pid``; ValueError for a machine without a table."""
    if machine not in _AUDIT_ARCH:
        raise ValueError(f"no system call table for {machine!r}; known: {', '.join(_AUDIT_ARCH)}")
    refused = _ERRNO | errno.EPERM
    program: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQ, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_GE, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, refused),
    ]
    for name, numbers in NUMBERS.items():
        number = numbers[_COLUMN[machine]]
        if number is None or name in _NOT_FOR_PROGRAMS:
            continue
        body = _body(name, pid)
        program += [(_JUMP_EQ, 0, len(body), number), *body]
    return [*program, (_RETURN, 0, 0, refused)]


def _body(name: str, pid: int) -> list[Instruction]:
    """What happens in the call ``name``; every path through it ends with a return."""
    if name in _NOT_IMPLEMENTED:
        return [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    if name in _SIGNAL_CALLS:
        return _if_equal(0, (pid,), errno.EPERM)
    if name == "prlimit64":
        return _if_equal(0, (0, pid), errno.EPERM)
    if name == "socketpair":
        return _if_equal(0, (_AF_UNIX,), errno.EPERM)
    if name == "fcntl":
        return _if_equal(1, _FCNTL_COMMANDS, errno.EPERM)
    if name == "ioctl":
        return _if_equal(1, _IOCTL_REQUESTS, errno.ENOTTY)
    if name == "clone":
        return [_argument(0), (_JUMP_SET, 1, 0, _CLONE_THREAD), _return(errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    if name in ("open", "openat"):
        flags = _argument(2 if name == "openat" else 1)
        return [flags, (_JUMP_SET, 0, 1, _WRITING), _return(errno.EROFS), (_RETURN, 0, 0, _ALLOW)]
    return [(_RETURN, 0, 0, _ALLOW)]


def _if_equal(position: int, values: tuple[int, ...], otherwise: int) -> list[Instruction]:
    """Allows the call when the low half of an argument, which is all that the kernel reads of it, is in ``values``."""
    tests = [(_JUMP_EQ, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [_argument(position), *tests, _return(otherwise), (_RETURN, 0, 0, _ALLOW)]


def _argument(position: int) -> Instruction:
    return (_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * position)


def _return(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)
