"""The recipe's grader under the interpreter's audit: a grade during which it writes, connects or starts anything raises."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from verl.utils.import_utils import load_extern_type

_GRADER = Path(__file__).resolve().parents[2] / "recipes" / "r1_zero" / "deepscaler.py"
_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename",
              "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.kill", "shutil.")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT

_grade = load_extern_type(str(_GRADER), "compute_score")
_seen: list[str] = []


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """The grader's own result."""
    _seen.clear()
    try:
        return _grade(data_source, solution_str, ground_truth, extra_info)
    finally:
        if _seen:
            raise PermissionError(f"the grader did {_seen[:5]}")


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not str(path).endswith(".pyc"):
            _seen.append(f"open {path}")
    elif event.startswith(_FORBIDDEN) or (event in ("exec", "compile") and _is_model_text(arguments)):
        _seen.append(event)


def _is_model_text(arguments: tuple[Any, ...]) -> bool:
    """Source text that is compiled under no file's name, as eval and exec of a string do."""
    return len(arguments) > 1 and arguments[1] == "<string>"


sys.addaudithook(_watch)
