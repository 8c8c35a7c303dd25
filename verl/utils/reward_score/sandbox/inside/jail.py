"""The process of a submitted program: it gives up its rights, reports which, then becomes the program.

Started by ``run.py`` with ``python -c``; the program shares this interpreter, so nothing here may be secret or have any
power once ``lock`` is through.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from . import privileges, seccomp

TYPE_CHECKING = False  # as typing's, whose import takes 3 ms
if TYPE_CHECKING:
    from typing import Any

MAIN_NAME = "__main__"
TESTED_NAME = "solution"  # of a program that is called by tests: its ``if __name__ == "__main__"`` part does not run


def main() -> None:
    """Argument: the settings as JSON (``run._settings``). The program's text comes on the descriptor ``control``."""
    settings = json.loads(sys.argv[1])
    control = os.fdopen(settings["control"], encoding="utf-8")
    layers = lock(settings)
    os.write(settings["report"], json.dumps({"layers": layers}).encode() + b"\n")
    program = json.loads(control.readline())
    _forget_the_start(settings)
    scope = vars(sys.modules["__main__"])
    scope["__name__"] = TESTED_NAME if settings["has_tests"] else MAIN_NAME
    exec(compile(program, "program.py", "exec"), scope)
    if settings["has_tests"]:
        # Success is a word that comes with the tests and goes back behind them: ending early, printing or catching
        # errors is none. A program that reads this channel or changes what its tests call can still have it.
        tests = json.loads(control.readline())
        exec(compile(tests["code"], "tests.py", "exec"), scope)
        os.write(settings["report"], tests["word"].encode())


def lock(settings: dict[str, Any]) -> list[str]:
    """Everything that this kernel has, in the order in which each step still may be taken; the layers that are on."""
    for name, limit in settings["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        hard = limit + (name == "RLIMIT_CPU") if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (min(limit, hard), hard))  # at a soft limit of CPU a signal of its own: SIGXCPU
    layers = ["limits"]
    uid, gid = os.getuid(), os.getgid()
    has_namespaces = privileges.leave_namespaces()
    if has_namespaces:
        layers.append("namespaces")
    privileges.forbid_new_privileges()
    if privileges.restrict_files(settings["readable"]):
        layers.append("landlock")
    elif has_namespaces and privileges.enter_own_root(settings["readable"], uid, gid):
        layers.append("own root")
    if privileges.drop_capabilities():
        layers.append("no capabilities")
    privileges.end_with(settings["parent"])  # after the steps that change what this process may: they undo it
    seccomp.apply_filter()
    return [*layers, "seccomp"]


def _forget_the_start(settings: dict[str, Any]) -> None:
    """A program sees no arguments, no environment but the few variables below, and an empty ``__main__``."""
    sys.argv[:] = ["program.py"]
    sys.path[:] = [path for path in sys.path if path != settings["own_path"]] + settings["packages"]
    os.environ.pop("PYTHONPATH", None)
    scope = vars(sys.modules["__main__"])
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
