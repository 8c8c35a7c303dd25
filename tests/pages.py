"""What tests read in the pages (functions, the metrics of docs/metrics.md), and a user's environment for commands."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# tests/run.sh and tests/conftest.py set these; a user who follows a page has none of them.
SET_BY_CI = (
    "OMP_NUM_THREADS",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "RAY_enable_worker_prestart",
    "RAY_prestart_worker_first_driver",
    "PYTHONPATH",
)
# tests/ray_workers.py: with these a user's Ray would have its workers forked here, and end them with all of this group.
SET_FOR_RAY_HERE = ("R1_ZERO_TEST_RAY_WORKERS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
REFERENCE = re.compile(r"`([\w.-]+/[\w/.-]+\.py):([A-Za-z_][\w.]*)`")


def users_environment() -> dict[str, str]:
    """Return the environment of a user who runs a page's command: this process's without the tests' own."""
    return {name: value for name, value in os.environ.items() if name not in SET_BY_CI + SET_FOR_RAY_HERE}


@cache
def functions_of(path: str) -> dict[str, str]:
    """Map the qualified name of every function and class of a file (a path relative to the root) to its source."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = ast.get_source_segment(text, child) or ""
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(text), "")
    return found


def missing_references(page: Path) -> list[str]:
    """List each ``file.py:function`` of a page that the tree does not have."""
    named = REFERENCE.findall(page.read_text(encoding="utf-8"))
    return [f"{path}:{name}" for path, name in named if not (ROOT / path).is_file() or name not in functions_of(path)]


@cache
def metric_rows() -> tuple[tuple[str, str], ...]:
    """Return (name as docs/metrics.md writes it, function that computes it) for every row."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return tuple(re.findall(r"^\| `([^`]+)` \| [^|]*\| .+ \| `([^`]+)` \|$", page, flags=re.MULTILINE))


def undocumented(names: Iterable[str]) -> list[str]:
    """List the metrics among ``names`` that docs/metrics.md does not have."""
    forms = [_form(name) for name, _ in metric_rows()]
    return sorted(name for name in set(names) - {"step"} if not any(form.fullmatch(name) for form in forms))


def _form(written: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>|\{[\w,]+\})", written)
    return re.compile("".join(_part_form(part) for part in parts))


def _part_form(part: str) -> str:
    if part == "<source>":
        return ".+"  # data sources may have slashes
    if part.startswith("<"):
        return "[^/]+"
    return f"(?:{part[1:-1].replace(',', '|')})" if part.startswith("{") else re.escape(part)
