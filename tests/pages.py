"""What pages say, as tests read it: the functions that they name, the metrics of docs/metrics.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = re.compile(r"`([\w.-]+/[\w/.-]+\.py):([A-Za-z_][\w.]*)`")


@cache
def functions_of(path: str) -> dict[str, str]:
    """Qualified name -> source of every function and class of a file, relative to the root."""
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
    """Every ``file.py:function`` of a page that is not in the tree."""
    named = REFERENCE.findall(page.read_text(encoding="utf-8"))
    return [f"{path}:{name}" for path, name in named if not (ROOT / path).is_file() or name not in functions_of(path)]


@cache
def metric_rows() -> tuple[tuple[str, str], ...]:
    """(name as docs/metrics.md writes it, the function that computes it) of every row."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return tuple(re.findall(r"^\| `([^`]+)` \| [^|]*\| .+ \| `([^`]+)` \|$", page, flags=re.MULTILINE))


def undocumented(names: Iterable[str]) -> list[str]:
    """The metrics among ``names`` that docs/metrics.md does not have."""
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
