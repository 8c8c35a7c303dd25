"""Holds the import table: who may import whom, and where the third parties and the device libraries are allowed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

EVERYTHING = {
    "recipes", "verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "mindspeed_llm", "third_party", "tools", "tests",
    "hf_formats",
}  # fmt: skip
MAY_IMPORT = {
    "recipes": EVERYTHING - {"tests", "tools"},
    "verl": {"megatron", "vllm", "mindspeed_llm", "hf_formats"},
    "vllm": {"hf_formats"},
    "vllm_ascend": {"vllm", "hf_formats"},
    "megatron": {"hf_formats"},
    "mindspeed": {"megatron"},
    "mindspeed_llm": {"megatron", "hf_formats"},
    "hf_formats": set(),
    "third_party": set(),
    "tools": EVERYTHING,
    "tests": EVERYTHING,
}
# A library that only these folders may import.
ONLY_IN = {
    "torch_npu": ("mindspeed", "vllm_ascend", "tests"),
    "ray": ("verl/single_controller/ray", "verl/trainer", "tools", "recipes", "tests"),
    "hydra": ("verl/trainer", "recipes", "tests"),
    "fastapi": ("vllm/entrypoints/openai",),
    "uvicorn": ("vllm/entrypoints/openai", "tools/report"),  # the model's server, a run's live page
    "openai": ("tests",),
}
# Read before any process starts, on machines that may have neither.
CONFIG_FOLDERS = ("verl/trainer/config", "verl/workers/config")
NOT_IN_CONFIG = {"torch", "ray", "torch_npu"}


def sources(*folders: str) -> list[Path]:
    """Every Python file of ``folders`` (files or folders relative to the root; absent ones have none)."""
    found: list[Path] = []
    for folder in folders:
        path = ROOT / folder
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return found


class Source(NamedTuple):
    """What is read of a file, which is parsed once: imports inside functions and type-checking blocks count too."""

    imports: list[tuple[int, str]]  # line, dotted name
    relative_imports: list[tuple[int, int]]  # line, level
    patches: list[tuple[int, str]]  # line, what is patched


@cache
def source(path: Path) -> Source:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = Source([], [], [] if path.is_relative_to(ROOT / "tests") else list(_patches(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.relative_imports.append((node.lineno, node.level))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.imports.append((node.lineno, node.module))
    return found


def imports(path: Path) -> list[tuple[int, str]]:
    return source(path).imports


def is_inside(path: Path, folders: tuple[str, ...]) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return any(name == folder or name.startswith(folder + "/") for folder in folders)


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_what_its_row_allows(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    wrong = [
        f"{at(path, line)}: {package} may not import {name}"
        for path in sources(package)
        for line, name in imports(path)
        if name.split(".")[0] in EVERYTHING - allowed
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    wrong = [
        f"{at(path, line)}: {name} belongs only in {', '.join(ONLY_IN[library])}"
        for path in sources(*sorted(EVERYTHING))
        if not is_inside(path, ONLY_IN[library])
        for line, name in imports(path)
        if name.split(".")[0] == library
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_relative_imports_stay_inside_their_package() -> None:
    wrong = []
    for path in sources(*sorted(EVERYTHING)):
        depth = len(path.relative_to(ROOT).parts) - 1
        for line, level in source(path).relative_imports:
            if level > depth:
                wrong.append(f"{at(path, line)}: relative import above the package")
    assert not wrong, "\n" + "\n".join(wrong)


def test_config_modules_need_neither_torch_nor_ray() -> None:
    wrong = [
        f"{at(path, line)}: a config module may not import {name}"
        for path in sources(*CONFIG_FOLDERS)
        for line, name in imports(path)
        if name.split(".")[0] in NOT_IN_CONFIG
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_nothing_is_patched_into_other_modules() -> None:
    """No ``sys.modules[...] = ...`` and no assignment to an attribute of an imported library."""
    wrong = [
        f"{at(path, line)}: {what}"
        for path in sources(*sorted(EVERYTHING - {"tests"}))
        if path.name != "_compat.py"
        for line, what in source(path).patches
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def _patches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    libraries = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            text = ast.unparse(target)
            if text.startswith("sys.modules["):
                yield node.lineno, f"writes {text}"
            elif isinstance(target, ast.Attribute) and _root_name(target) in libraries and not _is_setting(text):
                yield node.lineno, f"assigns {text}, an attribute of an imported module"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and _root_name(node.args[0]) in libraries:
            yield node.lineno, f"sets an attribute of {ast.unparse(node.args[0])}"


def _is_setting(target: str) -> bool:
    """Whether a library documents the assignment as its way to set something (torch.backends.x.y = ...)."""
    return target.startswith("torch.backends.")


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_the_checks_find_what_they_look_for() -> None:
    planted = ast.parse("import sys, torch\nsys.modules['x'] = 1\ntorch.compile = None\nsetattr(torch.nn, 'a', 1)\n")
    assert [line for line, _ in _patches(planted)] == [2, 3, 4]
    assert not list(_patches(ast.parse("import torch\ntorch.backends.cudnn.enabled = False\nself.x = 1\n")))


def test_packages_of_the_same_names_behind_ours_hide_none(tmp_path: Path) -> None:
    """A folder without ``__init__.py`` would give way to a package of its name that any later entry of the path has."""
    for name in EVERYTHING:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    code = f"import importlib.util as u\nfor name in {sorted(EVERYTHING)}: print(u.find_spec(name).origin)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [Path(line).parent.parent for line in done.stdout.splitlines()] == [ROOT] * len(EVERYTHING)
