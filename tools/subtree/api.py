"""The public names of a module and their signatures, read without importing it."""

from __future__ import annotations

import ast
from pathlib import Path


def public_api(path: Path) -> dict[str, str]:
    """Name -> signature of what a file defines in public: functions, classes (fields in order), methods, constants.

    Signatures are argument names with a ``=`` where there is a default: annotations and default values may differ
    between two trees without breaking a caller.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _add(found, node.name, _signature(node.args))
        elif isinstance(node, ast.ClassDef):
            _add(found, node.name, _fields(node))
            for item in node.body if not node.name.startswith("_") else []:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                    _add(found, f"{node.name}.{item.name}", _signature(item.args))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    _add(found, target.id, "value")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _add(found, node.target.id, "value")
    return found


def _add(found: dict[str, str], name: str, signature: str) -> None:
    last = name.rsplit(".", 1)[-1]
    if not last.startswith("_") or last == "__init__":
        found[name] = signature


def _signature(args: ast.arguments) -> str:
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    parts = [arg.arg + ("=" if index >= first_default else "") for index, arg in enumerate(positional)]
    if args.vararg:
        parts.append("*" + args.vararg.arg)
    elif args.kwonlyargs:
        parts.append("*")
    parts += [
        arg.arg + ("=" if default else "") for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parts.append("**" + args.kwarg.arg)
    return f"({', '.join(parts)})"


def _fields(node: ast.ClassDef) -> str:
    names = [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    return f"class({', '.join(names)})" if names else "class"
