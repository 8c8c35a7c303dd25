"""Which test files start processes: the sources say so, nobody keeps a list.

A file counts when it imports a library that starts processes (``subprocess``, ``multiprocessing``, ``ray``), a test
helper that counts, or a module of ours that imports such a library or another one of ours that does.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STARTERS = {"subprocess", "multiprocessing", "ray", "torch.multiprocessing", "concurrent.futures.ProcessPoolExecutor"}
# Every process of a run reads some 500 files; parsing them takes it over a second. Relative imports are not seen.
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w[\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|[^\n(]+)", re.MULTILINE)
COMMENT = re.compile(r"#.*")


@cache
def starts_processes(path: Path) -> bool:
    """Return whether a test file, or a helper among the tests that it imports, can start processes."""
    imported = _imports(path)
    if _has_starter(imported):
        return True
    sources = _sources(path)
    helpers = {source for source in sources if source.is_relative_to(ROOT / "tests")} - {path}
    modules = sources - helpers
    modules = modules.union(*(_sources(module) for module in modules))
    return any(starts_processes(helper) for helper in sorted(helpers)) or any(
        _has_starter(_imports(module)) for module in modules
    )


def runs_whole_jobs(path: Path) -> bool:
    """Return whether a test file runs recipes' commands, which takes the longest."""
    return any(name.startswith("tests.system.command") for name in _imports(path))


def _has_starter(imported: frozenset[str]) -> bool:
    return any(name in STARTERS or name.startswith(tuple(f"{starter}." for starter in STARTERS)) for name in imported)


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return all names that a file imports, in functions too: modules, and members with their module."""
    names: set[str] = set()
    for module, members in IMPORT.findall(path.read_text(encoding="utf-8")):
        listed = {name.split()[0] for name in COMMENT.sub("", members).strip("()").split(",") if name.strip()}
        names |= {module, *(f"{module}.{name}" for name in listed)} if module else listed
    return frozenset(names)


def _sources(path: Path) -> set[Path]:
    """Return the files of our modules that a file imports."""
    return {source for name in _imports(path) if (source := _source(name)) is not None}


@cache
def _source(module: str) -> Path | None:
    """Return the file of one of our modules; None for a package, a member or somebody else's module."""
    path = ROOT / (module.replace(".", "/") + ".py")
    return path if path.is_file() else None
