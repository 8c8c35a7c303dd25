"""Commands for the person who runs or changes this repository; each is `python -m tools.NAME --help`."""

import sys

_IN_WORKSHOP = ("adaptations", "bench", "gpu_day", "reference", "removals")

if "-m" in sys.orig_argv:  # a command of before: `python -m` imports this package first
    _asked = [*sys.orig_argv[sys.orig_argv.index("-m") + 1 :], ""][0]
    if _asked.split(".")[:1] == ["tools"] and _asked.split(".")[1:2] in [[name] for name in _IN_WORKSHOP]:
        sys.exit(f"error: python -m {_asked} is now python -m {_asked.replace('tools.', 'tools.workshop.', 1)}")
