"""What a text merge cannot see: a line of ours that is gone, a marked block that is cut, a call of what was deleted.

Each check returns sentences for people; a merge with any of them is staged, not committed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from tools import marks
from tools.subtree.api import statements

Texts = Mapping[str, str]  # path -> content
ANY_NAME = "*"  # stands for the names of a module that cannot be read, which nothing is reported of


def lost_lines(base: Texts, ours: Texts, merged: Texts) -> list[str]:
    """Lines that ours had added to the base and that are nowhere in the merged files."""
    added = _lines(ours) - _lines(base)
    gone = added - _lines(merged)
    paths = {line: path for path, text in ours.items() for line in text.splitlines()}
    return [f"{paths[line]}: this line of ours is not in the merged files: {line.strip()}" for line in gone]


def cut_blocks(ours: Texts, merged: Texts) -> list[str]:
    """Marked adaptations of ours that are not whole in the merged files."""
    everything = ["\n".join(["", *text.splitlines(), ""]) for text in merged.values()]
    found = []
    for path, text in ours.items():
        lines = text.splitlines()
        for mark in marks.parse(path, lines)[0]:
            block = lines[mark.line - 1 : mark.end_line or _end_of_statement(lines, mark.line)]
            if not any("\n".join(["", *block, ""]) in other for other in everything):
                found.append(f"{path}:{mark.line}: the adaptation '{mark.id}' is not as we wrote it any more")
    return found


def broken_names(before: Texts, after: Texts) -> list[str]:
    """Imports and calls of our own modules that the tree before could serve and the tree after cannot.

    Seen: ``from m import f``, ``import m``, ``m.f`` of an imported module, and a name that its own module defined.
    A deleted method is seen only through a class that is gone: who calls ``x.method()`` is not known from the text.
    """
    texts = {text for side in (before, after) for path, text in side.items() if path.endswith(".py")}
    names = {text: _names_of(text) for text in texts}  # most files are the same in both
    old, new = _definitions(before, names), _definitions(after, names)
    gone: set[tuple[str, str | None]] = set()
    for module, defined in old.items():
        if module not in new:
            package, _, last = module.rpartition(".")
            gone |= {(module, name) for name in (*defined, None)}
            gone |= set() if {last, ANY_NAME} & new.get(package, set()) else {(package, last)}
        elif ANY_NAME not in defined | new[module]:
            gone |= {(module, name) for name in defined - new[module] if f"{module}.{name}" not in new}
    words = {name or module.rpartition(".")[2] for module, name in gone}
    found = []
    for path, text in after.items():
        if not path.endswith(".py") or not any(word in text for word in words):
            continue
        for line, module, name in _uses(path, text, old):
            if {(module, name), (module, ANY_NAME)} & gone:
                what = f"'{name}' of {module}" if name else f"the module {module}"
                found.append(f"{path}:{line}: uses {what}, which is gone")
    return found


def _lines(texts: Texts) -> Counter[str]:
    return Counter(line for text in texts.values() for line in text.splitlines() if line.strip())


def _end_of_statement(lines: list[str], mark_line: int) -> int:
    """The number of the last line that a mark without END covers: its comment and the line after."""
    end = mark_line
    while end < len(lines) and lines[end].lstrip().startswith("#"):
        end += 1
    return min(end + 1, len(lines))


def _module_name(path: str) -> str:
    parts = list(PurePosixPath(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _definitions(texts: Texts, names: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Dotted module -> the names that its top level binds. A folder counts as a module too."""
    found: dict[str, set[str]] = {}
    for path, text in texts.items():
        if path.endswith(".py"):
            found[_module_name(path)] = names[text]
            for parent in list(PurePosixPath(path).parents)[:-1]:
                found.setdefault(".".join(parent.parts), set())
    return found


def _names_of(text: str) -> set[str]:
    tree = _parsed(text)
    return set(_bound(tree)) if tree else {ANY_NAME}


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _uses(path: str, text: str, modules: Mapping[str, set[str]]) -> list[tuple[int, str, str | None]]:
    """(line, module, name or None) for each use of a module of ours in a file."""
    tree = _parsed(text)
    if tree is None:
        return []
    here = _module_name(path)
    package = here if path.endswith("__init__.py") else here.rpartition(".")[0]
    uses: list[tuple[int, str, str | None]] = []
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            uses += [(node.lineno, module, alias.name) for alias in node.names if alias.name != "*"]
            aliases |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            uses += [(node.lineno, alias.name, None) for alias in node.names]
            aliases |= {alias.asname or alias.name: alias.name for alias in node.names}
    bound = set(_bound(tree))
    loaded: list[ast.Name] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and aliases.get(dotted := _dotted(node.value)) in modules:
            uses.append((node.lineno, aliases[dotted], node.attr))
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            loaded.append(node)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
    return uses + [(name.lineno, here, name.id) for name in loaded if name.id not in bound]


def _dotted(node: ast.expr) -> str:
    """ "a.b" of a chain of names; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _parsed(text: str) -> ast.Module | None:
    """None for a file that is not Python (conflict markers): git has reported it already."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None
