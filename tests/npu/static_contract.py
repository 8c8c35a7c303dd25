"""Binds every call of a torch_npu op in a source file to the op's schema, without torch_npu."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("2.5.1.post1", "2.13.0")
OP_CALL = re.compile(r"(?:torch_npu|torch\.ops\.npu)\.(_?npu_\w+)")


@dataclass(frozen=True)
class Schema:
    """Argument names of one overload of an op."""

    name: str
    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: frozenset[str]

    def problems(self, num_positional: int, keywords: set[str]) -> list[str]:
        """What of a call does not fit."""
        found = []
        if num_positional > len(self.positional):
            found.append(f"{num_positional} positional arguments, at most {len(self.positional)} are taken")
        given = set(self.positional[:num_positional])
        found += [f"no argument '{name}'" for name in sorted(keywords - {*self.positional, *self.keyword_only})]
        found += [f"argument '{name}' given twice" for name in sorted(given & keywords)]
        found += [f"argument '{name}' is missing" for name in sorted(self.required - given - keywords)]
        return found


def load_schemas(version: str) -> dict[str, list[Schema]]:
    """Op name -> its overloads in one torch_npu version (only the ops that the tree uses are kept there)."""
    table: dict[str, list[Schema]] = {}
    for line in (SCHEMAS / f"torch_npu_{version}.txt").read_text(encoding="utf-8").splitlines():
        schema = parse_schema(line)
        table.setdefault(schema.name, []).append(schema)
    return table


def parse_schema(line: str) -> Schema:
    """``npu::name.overload(Type arg=default, *, Type arg) -> ...``."""
    head = re.match(r"\w+::(\w+)(?:\.\w+)?\((.*)\) -> ", line)
    assert head, f"not a schema: {line}"
    positional: list[str] = []
    keyword_only: list[str] = []
    required = set()
    into = positional
    for text in re.split(r",\s*(?![^\[(]*[\])])", head[2]):
        if text.strip() == "*":
            into = keyword_only
            continue
        declaration, has_default, _ = text.partition("=")
        name = declaration.split()[-1]
        into.append(name)
        if not has_default:
            required.add(name)
    return Schema(head[1], tuple(positional), tuple(keyword_only), frozenset(required))


def problems_of(source: str, table: dict[str, list[Schema]]) -> list[str]:
    """``line: what is wrong`` for each torch_npu op call that no overload takes or that cannot be checked."""
    tree = ast.parse(source)
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    # `torch.ops.npu.x.default(...)` calls x too.
    called = {id(part) for f in functions for part in (f, f.value if isinstance(f, ast.Attribute) else f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (match := OP_CALL.fullmatch(ast.unparse(node.func).removesuffix(".default"))):
            found += [f"{node.lineno}: {match[1]}: {text}" for text in _call_problems(node, table.get(match[1], []))]
        elif isinstance(node, ast.Attribute) and id(node) not in called and OP_CALL.fullmatch(ast.unparse(node)):
            found.append(f"{node.lineno}: {ast.unparse(node)} is passed around: call it where it is named")
        else:
            found += [f"{node.lineno}: {text}" for text in _hidden_names(node)]
    return found


def _call_problems(call: ast.Call, overloads: list[Schema]) -> list[str]:
    if not overloads:
        return ["there is no such op (or its schema is not among those kept)"]
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(word.arg is None for word in call.keywords):
        return ["arguments are unpacked: write them out"]
    keywords = {word.arg for word in call.keywords if word.arg}
    return min((schema.problems(len(call.args), keywords) for schema in overloads), key=len)


def _hidden_names(node: ast.AST) -> Iterator[str]:
    """Ways to reach an op under another name."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch_npu":
        yield "names imported from torch_npu: write torch_npu.NAME"
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "torch_npu" and alias.asname:
                yield "torch_npu imported under another name"
    elif (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and ast.unparse(node.args[0]) == "torch_npu"
    ):
        yield "getattr on torch_npu: write torch_npu.NAME"
