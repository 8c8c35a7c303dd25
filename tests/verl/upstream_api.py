"""Upstream's public names and signatures, read from the list beside the repository, and how ours differ from them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_LIST = "shared/reference/api-verl-0.6.1.md"
_ENTRY = re.compile(
    r"^(?P<indent> *)- (?:class \*\*(?P<cls>\w+)\*\*|re-exports: `(?P<export>[^`]+)`|`(?P<code>.+?)`(?:  @|$))"
)


@dataclass
class Function:
    """A function or method: its source form ``name(parameters) -> type``."""

    name: str
    code: str

    def parameters(self) -> list[tuple[str, str, str | None]]:
        """(name, kind, source of the default or None) of every parameter, in order."""
        node = ast.parse(f"def {self.code}: ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
        found = [(a.arg, "plain", d) for a, d in zip(positional, defaults, strict=True)]
        if arguments.vararg:
            found.append((arguments.vararg.arg, "*", None))
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            found.append((argument.arg, "keyword", None if default is None else ast.unparse(default)))
        if arguments.kwarg:
            found.append((arguments.kwarg.arg, "**", None))
        return found


@dataclass
class Class:
    """A class: its methods by name, and its other members (fields, constants) with the source of their values."""

    name: str
    methods: dict[str, Function] = field(default_factory=dict)
    members: dict[str, str] = field(default_factory=dict)


@dataclass
class Module:
    """A module: what it defines, and what it re-exports, by name."""

    name: str
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    exports: list[str] = field(default_factory=list)


def api_file() -> Path | None:
    """The list, beside the repository or beside a folder that holds it; None when it is not there."""
    places = (folder / _LIST for folder in Path(__file__).resolve().parents[2:])
    return next((path for path in places if path.is_file()), None)


def upstream_api() -> dict[str, Module]:
    """Module name -> its public names; skips the calling test when the list is absent."""
    path = api_file()
    if path is None:
        pytest.skip(f"upstream's list of signatures, ../{_LIST}, is not here")
    return parse(path.read_text(encoding="utf-8"))


@cache
def parse(text: str) -> dict[str, Module]:
    """The modules of a list whose headings are modules and whose items are functions, classes and constants."""
    modules: dict[str, Module] = {}
    module, cls = Module(""), None
    for line in text.splitlines():
        if line.startswith("## "):
            module, cls = Module(line[3:].strip()), None
            modules[module.name] = module
        match = _ENTRY.match(line)
        if match is None:
            continue
        if match["export"]:
            module.exports += [
                name.split(" as ")[-1].strip() for name in match["export"].split("import ")[1].split(",")
            ]
        elif match["cls"]:
            cls = module.classes.setdefault(match["cls"], Class(match["cls"]))
        else:
            owner = cls if match["indent"] else None
            _add(module, owner, match["code"])
    return modules


def _add(module: Module, cls: Class | None, code: str) -> None:
    if re.match(r"\w+\(", code):
        name = code.split("(", 1)[0]
        (module.functions if cls is None else cls.methods)[name] = Function(name, code)
        return
    name, _, value = code.partition("=")
    name = name.split(":")[0].strip()
    (module.constants if cls is None else cls.members)[name] = value.strip()


def differences(ours: Callable[..., Any], upstream: Function) -> list[str]:
    """What a caller of upstream's function would stumble over in ours; nothing when the signatures agree.

    Names, order, kinds and defaults count, annotations do not. Ours may take more: keywords with a default.
    """
    described = [_describe(parameter) for parameter in inspect.signature(ours).parameters.values()]
    theirs = upstream.parameters()
    if theirs and theirs[0][0] in ("self", "cls") and (not described or described[0][0] != theirs[0][0]):
        theirs = theirs[1:]  # bound: a class method, or a method of an instance
    names = {name for name, _, _ in theirs}
    ours_only = [(name, kind, default) for name, kind, default in described if name not in names]
    described = [entry for entry in described if entry[0] in names]
    problems = [
        f"{upstream.name}: {name!r} is not upstream's and no keyword with a default"
        for name, kind, default in ours_only
        if kind != "keyword" or default is None
    ]
    shapes, expected_shapes = [entry[:2] for entry in described], [entry[:2] for entry in theirs]
    if shapes != expected_shapes:
        problems.append(f"{upstream.name}: parameters {shapes}, upstream {expected_shapes}")
        return problems
    for (name, _, default), (_, _, expected) in zip(described, theirs, strict=True):
        if not _same_default(default, expected):
            problems.append(f"{upstream.name}: {name}={default}, upstream {name}={expected}")
    return problems


def module_differences(name: str, *names: str) -> list[str]:
    """Differences of our module ``name`` from upstream's in ``names`` (functions, classes, constants, re-exports).

    A class is compared method by method. A method of upstream's that ours lacks counts, except private ones.
    """
    module, ours = upstream_api()[name], importlib.import_module(name)
    problems = []
    for wanted in names:
        if not hasattr(ours, wanted):
            problems.append(f"{name} has no {wanted}")
        elif wanted in module.functions:
            problems += [f"{name}.{text}" for text in differences(getattr(ours, wanted), module.functions[wanted])]
        elif wanted in module.classes:
            problems += _class_differences(name, getattr(ours, wanted), module.classes[wanted])
        elif wanted not in module.constants and wanted not in module.exports:
            problems.append(f"upstream's {name} has no {wanted}")
    return problems


def _class_differences(module: str, ours: type, upstream: Class) -> list[str]:
    place = f"{module}.{upstream.name}"
    instances = getattr(ours, "__dataclass_fields__", {})
    problems = [
        f"{place} has no {name}"
        for name in (*upstream.methods, *upstream.members)
        if not hasattr(ours, name) and name not in instances and name not in getattr(ours, "__annotations__", {})
    ]
    for name, method in upstream.methods.items():
        member = getattr(ours, name, None)
        if callable(member):
            problems += [f"{place}.{text}" for text in differences(member, method)]
    return problems


def _describe(parameter: inspect.Parameter) -> tuple[str, str, str | None]:
    kinds = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**", parameter.KEYWORD_ONLY: "keyword"}
    default = None if parameter.default is parameter.empty else _source(parameter.default)
    return parameter.name, kinds.get(parameter.kind, "plain"), default


def _source(value: Any) -> str:
    """``value`` as upstream's list writes it: an entry of an enumeration by its dotted name."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    return repr(value)


def _same_default(ours: str | None, upstream: str | None) -> bool:
    if ours is None or upstream is None:
        return ours == upstream
    try:
        return bool(ast.literal_eval(ours) == ast.literal_eval(upstream))
    except (ValueError, SyntaxError):  # an object that only its name can describe, like os.environ
        return re.match(r"[\w.]+$", ours) is None or ours.split(".")[-1] == upstream.split(".")[-1]
