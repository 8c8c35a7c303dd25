"""The public names of a module and their signatures, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

VALUE = "value"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_api(path: Path) -> dict[str, str]:
    """``api_of`` a file; ValueError when it is not Python (it has git's conflict markers, for example)."""
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
    args, value = function.args, ast.Name("")  # what a default value is shown as
    args.args, args.posonlyargs = [*args.posonlyargs, *args.args], []
    if method and args.args and args.args[0].arg in ("self", "cls"):
        del args.args[0]
    args.defaults = [value] * min(len(args.defaults), len(args.args))
    args.kw_defaults = [default and value for default in args.kw_defaults]
    for arg in filter(None, (*args.args, args.vararg, *args.kwonlyargs, args.kwarg)):
        arg.annotation = None
    return f"({ast.unparse(args)})"


def _fields(node: ast.ClassDef) -> str:
    names = [name for item in node.body if isinstance(item, ast.AnnAssign) for name in _assigned(item)]
    return f"class({', '.join(names)})" if names else "class"
