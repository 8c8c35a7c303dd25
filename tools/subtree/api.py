"""The public names of a module and their signatures, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

VALUE = "value"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_api(path: Path) -> dict[str, str]:
    """``api_of`` a file; ValueError when it is not Python (git's conflict markers, say)."""
    return api_of(path.read_text(encoding="utf-8", errors="replace"), str(path))


def api_of(text: str, name: str = "<text>") -> dict[str, str]:
    """Name -> signature of what a module defines in public: functions, classes (fields in order), methods, constants.

    Signatures are argument names with a ``=`` where there is a default, without ``self`` and ``cls``: annotations and
    default values may differ between two trees without breaking a caller.
    """
    try:
        tree = ast.parse(text, name)
    except SyntaxError as error:
        raise ValueError(
            f"{name}:{error.lineno}: not Python ({error.msg}): are git's conflict markers left?"
        ) from error
    found: dict[str, str] = {}
    for node in statements(tree.body):
        if isinstance(node, Function):
            _add(found, node.name, _signature(node, method=False))
        elif isinstance(node, ast.ClassDef):
            _add(found, node.name, _fields(node))
            for item in node.body if not node.name.startswith("_") else []:
                if isinstance(item, Function):
                    _add(found, f"{node.name}.{item.name}", _signature(item, method=True))
        else:
            for assigned in _assigned(node):
                _add(found, assigned, VALUE)
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module body, those under a top-level ``if`` or ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handlers = [inner for handler in node.handlers for inner in handler.body]
            yield from statements(node.body + handlers + node.orelse + node.finalbody)


def _assigned(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _add(found: dict[str, str], name: str, signature: str) -> None:
    last = name.rsplit(".", 1)[-1]
    if not last.startswith("_") or last == "__init__":
        found[name] = signature


def _signature(function: Function, method: bool) -> str:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    parts = [arg.arg + ("=" if index >= first_default else "") for index, arg in enumerate(positional)]
    if method and parts and parts[0] in ("self", "cls"):
        parts = parts[1:]
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
