"""Which functions and classes a command, a recipe or a plug-in reaches, found by reading the sources.

A name counts as used where code that is itself reached reads it: a definition of the module, or what an import binds,
followed through re-exports, which are no use themselves. Code is followed by name through functions, classes and
modules; methods live and die with their class. Strings lead on too: ``module:name``, ``package.module.name``, a module
beside the name of one of its functions, and ``-m module`` in scripts, pages and code.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Node = tuple[str, str]  # module, name
Target = Node | str  # a name of a module, or a module

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?::\w+)?")
_PATH = re.compile(r"([\w/]+)\.py\b")
_PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_AS_MODULE = re.compile(r"-m ([\w.]+)")
# Decorators that only change what a function is; any other one may register it, so that it is used where it stands.
_PLAIN = frozenset(
    [
        "dataclass",
        "contextmanager",
        "asynccontextmanager",
        "cache",
        "lru_cache",
        "overload",
        "total_ordering",
        "runtime_checkable",
        "wraps",
        "no_grad",
        "inference_mode",
        "record_function",
        "property",
        "staticmethod",
        "classmethod",
    ]
)


@dataclass
class Module:
    """What a module defines and binds, and its other statements, which run when it is imported."""

    name: str
    is_package: bool
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    statements: list[ast.stmt] = field(default_factory=list)
    main: ast.stmt | None = None

    def read(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, Definition):
                self.definitions.setdefault(statement.name, []).append(statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and (names := list(_assigned(statement))):
                for name in names:
                    self.definitions.setdefault(name, []).append(statement)
            elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
                if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
                    self.main = statement
                    continue
                for part in ("body", "orelse", "finalbody"):
                    self.read(getattr(statement, part, []))
                for handler in getattr(statement, "handlers", []):
                    self.read(handler.body)
            else:
                self.statements.append(statement)
                self.imports |= dict(self.bound_by(statement))

    def bound_by(self, tree: ast.AST) -> Iterator[tuple[str, tuple[str, str | None]]]:
        """(name, (module, its name or None for the module)) of each import below ``tree``."""
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    yield (alias.asname, (alias.name, None)) if alias.asname else (first, (first, None))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield alias.asname or alias.name, (self._absolute(node), alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")
        parents = parents[: len(parents) - node.level + self.is_package]
        return ".".join([*parents, *([node.module] if node.module else [])])


class Reachability:
    """Reads all modules of ``packages`` below ``root``; then ``use_...`` adds what is used from outside."""

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        self.modules: dict[str, Module] = {}
        self.used: set[Node] = set()
        self._imported: set[str] = set()
        self._run_as_main: set[str] = set()
        self._queue: list[Target] = []
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                module = Module(name, parts[-1] == "__init__")
                module.read(statements(path))
                self.modules[name] = module

    def use_text(self, text: str, *, names_code: bool) -> None:
        """Commands in a page or script, Python code in a page and, where ``names_code``, dotted names."""
        for name in _AS_MODULE.findall(text):
            self._run(name)
        for code in _PYTHON_BLOCK.findall(text):
            page = Module("", False)
            page.read(ast.parse(code).body)
            self._scan(page, ast.parse(code))
        for name in _DOTTED.findall(text):
            if names_code or ":" in name:
                self._use_string(name)
        for path in _PATH.findall(text) if names_code else ():
            if (module := path.replace("/", ".")) in self.modules:
                self.use(module)
        self._follow()

    def use(self, module: str, *names: str) -> None:
        """Names of a module, all of its definitions without any."""
        for name in names or self.modules[module].definitions:
            if self._resolve(module, name) is None:
                raise ValueError(f"{module} has no {name}")
            self._reach(self._resolve(module, name))
        self._follow()

    def unused(self) -> list[str]:
        """``module.name`` of every public function and class that nothing reaches."""
        return [
            f"{module.name}.{name}"
            for module in self.modules.values()
            for name, found in module.definitions.items()
            if isinstance(found[0], Definition) and not name.startswith("_") and (module.name, name) not in self.used
        ]

    def _reach(self, target: Target | None) -> None:
        if isinstance(target, str):
            self._import(target)
        elif target is not None and target not in self.used:
            self.used.add(target)
            self._import(target[0])
            self._queue.append(target)

    def _import(self, name: str) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent in self.modules and parent not in self._imported:
                self._imported.add(parent)
                self._queue.append(parent)

    def _run(self, name: str) -> None:
        """``python -m name``."""
        for module in (self.modules.get(name), self.modules.get(f"{name}.__main__")):
            if module is not None and module.name not in self._run_as_main:
                self._run_as_main.add(module.name)
                self._import(module.name)
                if module.main is not None:
                    self._scan(module, module.main)

    def _follow(self) -> None:
        while self._queue:
            target = self._queue.pop()
            if not isinstance(target, str):
                for definition in self.modules[target[0]].definitions[target[1]]:
                    self._scan(self.modules[target[0]], definition)
                continue
            module = self.modules[target]
            for statement in module.statements:
                self._scan(module, statement)
            for name, found in module.definitions.items():
                if any(_may_register(one) for one in found):
                    self._reach((target, name))

    def _scan(self, module: Module, tree: ast.AST) -> None:
        """Follow everything that ``tree`` reads."""
        local = dict(module.bound_by(tree))
        for source, name in local.values():
            self._import(source if name is None or f"{source}.{name}" not in self.modules else f"{source}.{name}")
        for node in nodes(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                target = self._look_up(module, local, node.id)
                if not isinstance(target, str):
                    self._reach(target)
            elif isinstance(node, ast.Attribute):
                self._reach(self._attribute(module, local, node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._use_string(node.value)
            elif isinstance(node, ast.Call):
                self._scan_call(module, local, node)

    def _scan_call(self, module: Module, local: dict[str, tuple[str, str | None]], call: ast.Call) -> None:
        """``getattr(module, name)`` reaches all names of a module; two strings may be a module and its function."""
        words = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        for source, name in itertools.pairwise(words):
            if source in self.modules and isinstance(name, str):
                self._reach(self._resolve(source, name))
        if isinstance(call.func, ast.Name) and call.func.id == "getattr" and isinstance(call.args[0], ast.Name):
            target = self._look_up(module, local, call.args[0].id)
            if isinstance(target, str) and target in self.modules and not isinstance(call.args[1], ast.Constant):
                for name in self.modules[target].definitions:
                    self._reach((target, name))

    def _look_up(self, module: Module, local: dict[str, tuple[str, str | None]], name: str) -> Target | None:
        if name not in local and name in module.definitions and module.name:
            return (module.name, name)
        source, its_name = local.get(name) or module.imports.get(name) or ("", None)
        return self._resolve(source, its_name) if its_name is not None else source

    def _attribute(
        self, module: Module, local: dict[str, tuple[str, str | None]], node: ast.Attribute
    ) -> Target | None:
        names: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
            value = value.value
        target = self._look_up(module, local, value.id) if isinstance(value, ast.Name) else None
        for name in names:
            if isinstance(target, str):
                target = self._resolve(target, name)
        return target

    def _resolve(self, source: str, name: str, seen: frozenset[Node] = frozenset()) -> Target | None:
        """What ``source.name`` is, through any number of re-exports; None for what is not ours."""
        module, inner = self.modules.get(source), f"{source}.{name}"
        if module is not None and name in module.definitions:
            return (source, name)
        if module is not None and name in module.imports and (source, name) not in seen:
            other, its_name = module.imports[name]
            found = other if its_name is None else self._resolve(other, its_name, seen | {(source, name)})
            if found is not None:
                return found
        if inner in self.modules:
            return inner
        return (source, "__getattr__") if module is not None and "__getattr__" in module.definitions else None

    def _use_string(self, text: str) -> None:
        for dotted in _DOTTED.findall(text):
            source, _, name = dotted.partition(":")
            if name:
                self._reach(self._resolve(source, name))
            elif dotted in self.modules or f"{dotted}.__main__" in self.modules:
                self._run(dotted)
            else:
                source, _, name = dotted.rpartition(".")
                self._reach(self._resolve(source, name))


@cache
def statements(path: Path) -> list[ast.stmt]:
    """The statements of a file."""
    return ast.parse(path.read_text(encoding="utf-8")).body


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """What imports or reads something below ``tree``, in the order of ``ast.walk``."""
    kinds = (ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Constant, ast.Call)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _assigned(statement: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _may_register(statement: ast.stmt) -> bool:
    return isinstance(statement, Definition) and any(
        ast.unparse(one.func if isinstance(one, ast.Call) else one).split(".")[-1] not in _PLAIN
        for one in statement.decorator_list
    )
