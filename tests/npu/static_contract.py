"""Binds every use of torch_npu in a source file to the ops and functions of both torch_npu versions, without torch_npu.

A call is found under any name: an import's, an alias', a literal getattr's. What cannot be followed (an op passed
around, unpacked arguments, a computed name) is a problem too. A file called ``_compat.py`` may use what only one
version has, if each of its functions has a form for every version. Not followed: methods of objects that torch_npu
made, and the device module that ``verl.utils.device`` takes from torch by the device's name.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.npu.schema_types import UNKNOWN, Kinds, Schema, kinds_of, kinds_of_annotation, parse_schema, parse_signature

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("2.5.1.post1", "2.13.0")
MODULES = ("torch_npu", "torch.npu", "torch.ops.npu")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Contract:
    """What of one torch_npu version the tree uses: op name -> overloads, Python name -> signature."""

    ops: dict[str, list[Schema]]
    functions: dict[str, Schema]


@dataclass(frozen=True)
class Use:
    """One place that names something of torch_npu; ``call`` when it is called there."""

    line: int
    path: str  # e.g. torch_npu.npu_swiglu, torch.ops.npu.npu_swiglu.default, torch_npu.npu.set_device
    call: ast.Call | None
    function: str  # top-level function or class that it is in
    kinds: partial[Kinds]

    @property
    def op(self) -> tuple[str, str | None] | None:
        """(op, overload or None for any), None when it is no op."""
        parts = self.path.removeprefix("torch_npu.").removeprefix("torch.ops.npu.").split(".")
        if not (self.path.startswith("torch.ops.npu.") or parts[0].startswith(("npu_", "_npu_"))):
            return None
        return parts[0], None if len(parts) == 1 else parts[1].removesuffix("default")

    @property
    def python_name(self) -> str:
        return self.path.replace("torch.npu", "torch_npu.npu", 1) if self.path.startswith("torch.npu") else self.path

    def problems(self, contract: Contract) -> list[str]:
        """What of this use one version does not take."""
        if self.op is None:
            if self.python_name not in contract.functions:
                return [f"{self.path}: there is no such name (or it is not among those kept)"]
            overloads = [contract.functions[self.python_name]]
        else:
            name, overload = self.op
            overloads = [s for s in contract.ops.get(name, []) if overload is None or s.overload == overload]
            if not overloads:
                return [f"{self.path}: there is no such op (or its schema is not among those kept)"]
        if self.call is None:
            return []
        if any(isinstance(arg, ast.Starred) for arg in self.call.args) or any(not w.arg for w in self.call.keywords):
            return [f"{self.path}: arguments are unpacked: write them out"]
        return [f"{self.path}: {text}" for text in min((s.problems(self.call, self.kinds) for s in overloads), key=len)]


def load_contract(version: str) -> Contract:
    """The lines kept in ``schemas/``."""
    ops: dict[str, list[Schema]] = {}
    for line in (SCHEMAS / f"torch_npu_{version}.txt").read_text(encoding="utf-8").splitlines():
        schema = parse_schema(line)
        ops.setdefault(schema.name, []).append(schema)
    lines = (SCHEMAS / f"python_api_{version}.txt").read_text(encoding="utf-8").splitlines()
    return Contract(ops, {schema.name: schema for schema in map(parse_signature, lines)})


def problems_of(source: str, contracts: dict[str, Contract], is_compat: bool = False) -> list[str]:
    """``line: what is wrong`` for every use that does not fit, and for what cannot be followed."""
    reader = _read(source)
    found = list(reader.problems)
    by_version = {version: [use.problems(contract) for use in reader.uses] for version, contract in contracts.items()}
    for index, use in enumerate(reader.uses):
        texts = {version: problems[index] for version, problems in by_version.items()}
        is_bad = (all if is_compat else any)(texts.values())
        for text in dict.fromkeys(text for problems in texts.values() for text in problems) if is_bad else ():
            versions = [version for version, problems in texts.items() if text in problems]
            where = "" if len(versions) == len(contracts) else f" ({', '.join(versions)})"
            found.append((use.line, f"{text}{where}"))
    if is_compat:
        found += _missing_forms(reader.uses, by_version)
    return [f"{line}: {text}" for line, text in sorted(found)]


def uses_of(source: str) -> list[Use]:
    """Every use of torch_npu in a source."""
    return _read(source).uses


@functools.cache
def _read(source: str) -> Reader:
    reader = Reader()
    reader.read(source)
    return reader


def _missing_forms(uses: list[Use], by_version: dict[str, list[list[str]]]) -> Iterator[tuple[int, str]]:
    """Functions of a compatibility file that one version cannot run."""
    for function in dict.fromkeys(use.function for use in uses):
        own = [index for index, use in enumerate(uses) if use.function == function]
        for version, problems in by_version.items():
            if all(problems[index] for index in own):
                yield uses[own[0]].line, f"{function} has no form for torch_npu {version}"


@dataclass
class Scope:
    """The names that a module or function binds: to a path of torch_npu (or None), and to values of some kind."""

    parent: Scope | None = None
    paths: dict[str, set[str | None]] = field(default_factory=dict)
    kinds: dict[str, list[Kinds]] = field(default_factory=dict)

    def path_of(self, name: str) -> str | None:
        if name in self.paths:
            found = {path for path in self.paths[name] if path is not None}
            return found.pop() if len(found) == 1 else None
        return self.parent.path_of(name) if self.parent else None

    def kinds_of(self, name: str) -> Kinds:
        if name in self.kinds:
            alike = set(self.kinds[name])
            return alike.pop() if len(alike) == 1 else UNKNOWN
        return self.parent.kinds_of(name) if self.parent else UNKNOWN


class Reader:
    """Walks a source scope by scope: first what a scope binds, then what it uses."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.problems: list[tuple[int, str]] = []
        self._followed: set[int] = set()  # ids of expressions that a name now stands for

    def read(self, source: str) -> None:
        self._read_scope(ast.parse(source), Scope(), "the module")

    def _read_scope(self, node: ast.AST, scope: Scope, function: str) -> None:
        own = list(_own_nodes(node))
        if isinstance(node, Function):
            for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                _bind(scope, arg.arg, None, kinds_of_annotation(arg.annotation))
        for part, _ in own:
            self._bind_names(part, scope)
        for part, parent in own:
            self._find_use(part, parent, scope, function)
        for part, _ in own:
            if isinstance(part, Function | ast.ClassDef):
                is_first = function == "the module" and not isinstance(part, ast.Lambda)
                self._read_scope(part, Scope(scope), part.name if is_first else function)  # type: ignore[union-attr]

    def _bind_names(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    top = alias.name.split(".")[0]
                    _bind(scope, alias.asname or top, alias.name if alias.asname else top)
            case ast.ImportFrom(module=str(module), names=aliases, level=0) if module.split(".")[0] in _PACKAGES:
                for alias in aliases:
                    _bind(scope, alias.asname or alias.name, f"{module}.{alias.name}")
                    if alias.name == "*" and module in MODULES:
                        self.problems.append((node.lineno, f"from {module} import *: write the names"))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind_target(target, value, scope)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                _bind(scope, name, self._follow(value, scope), kinds_of_annotation(annotation))
            case ast.NamedExpr(target=target, value=value):
                self._bind_target(target, value, scope)
            case ast.For(target=target) | ast.comprehension(target=target) | ast.AugAssign(target=target):
                _bind_unknown(target, scope)
            case ast.withitem(optional_vars=ast.expr() as target):
                _bind_unknown(target, scope)

    def _bind_target(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            _bind(scope, target.id, self._follow(value, scope), kinds_of(value, scope.kinds_of))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._bind_target(one, its, scope)
        else:
            _bind_unknown(target, scope)

    def _follow(self, value: ast.expr | None, scope: Scope) -> str | None:
        path = self._path(value, scope) if value is not None else None
        if path is not None:
            self._followed.add(id(value))
        return path

    def _find_use(self, node: ast.AST, parent: ast.AST, scope: Scope, function: str) -> None:
        if not isinstance(node, ast.expr) or _is_part_of_path(node, parent):
            return
        path = self._path(node, scope)
        if path is None or isinstance(getattr(node, "ctx", None), ast.Store):
            return
        is_followed = id(node) in self._followed
        if not path.startswith(tuple(f"{module}." for module in MODULES)):
            if path in MODULES and not is_followed:
                self.problems.append((node.lineno, f"{path} is passed around: name what is used of it"))
            return
        call = parent if isinstance(parent, ast.Call) and parent.func is node else None
        use = Use(node.lineno, path, call, function, partial(kinds_of, kinds_of_name=scope.kinds_of))
        self.uses.append(use)
        if use.op is not None and call is None and not is_followed:
            self.problems.append((node.lineno, f"{path} is passed around: call it where it is named"))

    def _path(self, node: ast.expr, scope: Scope) -> str | None:
        """The dotted path that an expression names, if it begins at torch or torch_npu."""
        match node:
            case ast.Name(id=name):
                return scope.path_of(name)
            case ast.Attribute(value=value, attr=attr):
                base = self._path(value, scope)
                return base and f"{base}.{attr}"
            case ast.NamedExpr(value=value):
                return self._path(value, scope)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, name_node, *_]):
                base = self._path(value, scope)
                if isinstance(name_node, ast.Constant):
                    return base and f"{base}.{name_node.value!s}"
                problem = (node.lineno, f"getattr on {base} with a computed name: write the names")
                if base in MODULES and problem not in self.problems:
                    self.problems.append(problem)
            case ast.Call(args=[ast.Constant(value=str(name))]) if ast.unparse(node.func).endswith(_IMPORTERS):
                return name if name.split(".")[0] in _PACKAGES else None
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                return name if ast.unparse(value) == "sys.modules" and name.split(".")[0] in _PACKAGES else None
        return None


_PACKAGES = ("torch", "torch_npu")
_IMPORTERS = ("import_module", "__import__")


def _own_nodes(scope_node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(node, parent) in source order, without what lies inside of functions and classes of its own."""
    for child in ast.iter_child_nodes(scope_node):
        yield child, scope_node
        if not isinstance(child, Function | ast.ClassDef):
            yield from _own_nodes(child)


def _is_part_of_path(node: ast.expr, parent: ast.AST) -> bool:
    if isinstance(parent, ast.Attribute):
        return True
    is_getattr = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "getattr"
    return is_getattr and isinstance(parent, ast.Call) and bool(parent.args) and parent.args[0] is node


def _bind(scope: Scope, name: str, path: str | None, kinds: Kinds = UNKNOWN) -> None:
    scope.paths.setdefault(name, set()).add(path)
    scope.kinds.setdefault(name, []).append(kinds)


def _bind_unknown(target: ast.expr, scope: Scope) -> None:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            _bind(scope, node.id, None)
