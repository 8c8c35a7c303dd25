"""``python -m tools.plan CONFIG [key=value ...]``: whether a run fits and its ranks' calls match, and its step time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from rich.console import Console

from tools.plan.exit_status import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 the run fits, 1 it does not, 2 there is nothing to plan, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True)
    if not console.is_terminal and not {"--brief", "--help", "-h"} & {*arguments}:
        console.print("planning ...")

    def end_at_once(number: int, frame: FrameType | None) -> None:
        console.show_cursor(True)
        os._exit(INTERRUPTED)

    # Loading torch and the workers takes seconds: something moves on a terminal from the first one on, and Ctrl-C is
    # heard, which modules swallow while they are loaded. Once there are processes to end, it is an exception again.
    before = signal.signal(signal.SIGINT, end_at_once)
    try:
        with suppress(KeyboardInterrupt), console.status("planning") as progress:
            from tools.plan.command import run

            return run(arguments, progress)
    finally:
        signal.signal(signal.SIGINT, before)
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
