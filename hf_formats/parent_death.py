"""``python parent_death.py PARENT_PID command ...``: run a command that is sent SIGTERM when its parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when its parent dies, however it dies (Linux, prctl(2)).

    What counts is the thread of the parent that started this process. SystemExit where the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it died before prctl
        sys.exit(f"the process {parent_pid} that started this one is gone")


def main() -> None:
    """Set the signal, then become the command."""
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
