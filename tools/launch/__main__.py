"""``python -m tools.launch RECIPE ...``: a recipe's whole job on this node, from the checks to the report."""

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
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help"} & set(arguments):
        return _print_help(arguments)
    try:
        try:
            from tools.launch.command import launch
        except ModuleNotFoundError as error:
            need = "it needs what requirements/ lists; bash tools/setup_env.sh makes such an environment (VENV_DIR)"
            print(f"error: {sys.executable} has no module {error.name}: {need}\nNothing was started.", flush=True)
            return BAD_INPUT
        return launch(arguments)
    except KeyboardInterrupt:
        print("error: stopped by SIGINT\nNothing was started.", flush=True)
        return 128 + signal.SIGINT


def _print_help(arguments: list[str]) -> int:
    """Print the help that ``arguments`` ask for; it comes before set-up, so nothing of an environment is loaded."""
    from tools.launch.help import help_text

    try:
        print(help_text(arguments or ["--help"]), flush=True)
    except ValueError as error:
        print(f"error: {error}", flush=True)
        return BAD_INPUT
    return 0 if arguments else BAD_INPUT


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes from the terminal and from the script that waits
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
