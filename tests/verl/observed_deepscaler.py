"""The recipe's grader under the interpreter's audit: when it writes, connects or starts anything, the grade raises."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from verl.utils.import_utils import load_extern_type

_GRADER = Path(__file__).resolve().parents[2] / "recipes" / "r1_zero" / "deepscaler.py"
_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.remove", "os.rename",
              "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.kill",
              "shutil.")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_WORDS_OF_ANSWERS = ("__import__", "__class__", "__builtins__", "__subclasses__", "os.system", "open(", "open (",
                     "exec(", "exec (", "eval(", "eval (", "touch")  # fmt: skip

import_module("math_verify")  # takes a second, which is not the first answer's
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
    elif event.startswith(_FORBIDDEN) or (event == "compile" and _is_model_code(arguments)):
        _seen.append(event)


def _is_model_code(arguments: tuple[Any, ...]) -> bool:
    """Whether something is compiled that only an answer can have said; a LaTeX parser compiles its own numbers."""
    source = arguments[0]
    text = source.decode(errors="replace") if isinstance(source, bytes) else str(source)
    return any(word in text for word in _WORDS_OF_ANSWERS)


sys.addaudithook(_watch)
