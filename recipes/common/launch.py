"""``python -m recipes.common.launch RECIPE ...``: a recipe's whole job on this node, from the checks to the report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from recipes.common.exit_status import BAD_INPUT


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 0 done, 1 failed, 2 a setting that must be mended, 128 + n stopped by a signal."""
    # A shell starts what it does not wait for with SIGINT ignored. Loading the rest takes seconds: listen before that.
    signal.signal(signal.SIGINT, _interrupt)
    try:
        try:
            from recipes.common.launcher.command import launch
        except ModuleNotFoundError as error:
            need = "it needs what requirements/ lists; bash tools/setup_env.sh makes such an environment (VENV_DIR)"
            print(f"error: {sys.executable} has no module {error.name}: {need}\nNothing was started.", flush=True)
            return BAD_INPUT
        return launch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("error: stopped by SIGINT\nNothing was started.", flush=True)
        return 128 + signal.SIGINT


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes from the terminal and from the script that waits
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
