"""``python without_system_calls.py UID NUMBER ...``: what the sandbox says where a kernel lacks these calls.

Prints the reason for refusing (or ``holds``) and the layers. The calls are taken away from this process for ever, by a
filter of its own; the numbers are those of x86_64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

from verl.utils.reward_score.sandbox import missing_protection, sandbox_layers


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def take_away(numbers: list[int]) -> None:
    """From now on these calls are "not implemented"."""
    code = b"".join(
        [_instruction(0x20, 0, 0, 0)]
        + [_instruction(0x15, 0, 1, number) + _instruction(0x06, 0, 0, 0x50000 | errno.ENOSYS) for number in numbers]
        + [_instruction(0x06, 0, 0, 0x7FFF0000)]
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0


def _instruction(code: int, true: int, false: int, k: int) -> bytes:
    return code.to_bytes(2, "little") + bytes((true, false)) + k.to_bytes(4, "little")


if __name__ == "__main__":
    if os.getuid() != int(sys.argv[1]):
        os.setuid(int(sys.argv[1]))
        os.execv(sys.executable, [sys.executable, "-m", "tests.verl.without_system_calls", *sys.argv[1:]])
    take_away([int(number) for number in sys.argv[2:]])
    print(missing_protection() or "holds")
    print(*sandbox_layers(), sep=", ")
