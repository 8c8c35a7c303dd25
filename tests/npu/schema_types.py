"""torch op schemas, and which Python expressions their arguments take; without torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass

# What an expression is, as far as its source says: "Tensor", "int", "float", "bool", "str", "dtype", "None",
# "list[int]", "list[Tensor]", ..., "list[?]", "list[]". An empty set: not known, and taken for right.
Kinds = frozenset[str]
UNKNOWN: Kinds = frozenset()
TAKES = {
    "Tensor": {"Tensor"},
    "Tensor[]": {"list[Tensor]"},
    "int": {"int", "dtype"},
    "SymInt": {"int"},
    "int[]": {"list[int]"},
    "SymInt[]": {"list[int]"},
    "float": {"float", "int"},
    "float[]": {"list[float]", "list[int]"},
    "bool": {"bool"},
    "bool[]": {"list[bool]"},
    "str": {"str"},
    "ScalarType": {"dtype"},
    "Scalar": {"int", "float", "bool"},
}
TENSOR_METHODS = {"clone", "contiguous", "expand", "float", "masked_fill", "t", "to", "unflatten", "unsqueeze", "view"}
TENSOR_FACTORIES = {"arange", "cat", "empty", "empty_like", "full", "ones", "stack", "tensor", "zeros", "zeros_like"}
BUILTINS = {"len": "int", "int": "int", "float": "float", "str": "str", "bool": "bool", "list": "list[?]"}
DTYPES = re.compile(r"torch\.(float\d+|bfloat16|half|u?int\d+|bool|long|float8_\w+)")


@dataclass(frozen=True)
class Argument:
    """One argument of a schema; ``type`` as the schema writes it."""

    name: str
    type: str
    has_default: bool

    def problem(self, kinds: Kinds) -> str | None:
        """Why none of the kinds can be right, None when it can (one that is wrong is enough to complain)."""
        base, is_optional = re.sub(r"\([^)]*\)", "", self.type.rstrip("?")), self.type.endswith("?")
        base = re.sub(r"\[\d+\]", "[]", base)
        taken = TAKES.get(base)
        for kind in sorted(kinds):
            is_list = kind.startswith("list[")
            if (kind == "None" and is_optional) or taken is None or kind in taken:
                continue
            if is_list and base.endswith("[]") and kind in ("list[?]", "list[]"):
                continue
            return f"argument '{self.name}' is {kind}, but {self.type} is wanted"
        return None


@dataclass(frozen=True)
class Schema:
    """One overload of an op, or the signature of a function."""

    name: str
    overload: str
    positional: tuple[Argument, ...]
    keyword_only: tuple[Argument, ...]
    takes_more: bool = False  # *args or **kwargs

    def problems(self, call: ast.Call, kinds_of: Callable[[ast.expr], Kinds]) -> list[str]:
        """What of a call does not fit: count, names, types."""
        found = []
        keywords = {word.arg: word.value for word in call.keywords if word.arg}
        by_name = {argument.name: argument for argument in (*self.positional, *self.keyword_only)}
        if len(call.args) > len(self.positional) and not self.takes_more:
            found.append(f"{len(call.args)} positional arguments, at most {len(self.positional)} are taken")
        given = {argument.name for argument in self.positional[: len(call.args)]}
        if not self.takes_more:
            found += [f"no argument '{name}'" for name in sorted(set(keywords) - set(by_name))]
        found += [f"argument '{name}' given twice" for name in sorted(given & set(keywords))]
        required = {argument.name for argument in by_name.values() if not argument.has_default}
        found += [f"argument '{name}' is missing" for name in sorted(required - given - set(keywords))]
        values = [*zip(self.positional, call.args, strict=False)]
        values += [(by_name[name], value) for name, value in keywords.items() if name in by_name]
        found += [problem for argument, value in values if (problem := argument.problem(kinds_of(value)))]
        return found


def parse_schema(line: str) -> Schema:
    """``npu::name.overload(Type arg=default, *, Type arg) -> ...``."""
    head = re.fullmatch(r"\w+::(\w+)(?:\.(\w+))?\((.*)\) -> .*", line)
    assert head, f"not a schema: {line}"
    positional: list[Argument] = []
    keyword_only: list[Argument] = []
    into = positional
    for text in re.split(r",\s*(?![^\[(]*[\])])", head[3]) if head[3] else []:
        if text.strip() == "*":
            into = keyword_only
            continue
        declaration, has_default, _ = text.partition("=")
        kind, name = declaration.rsplit(" ", 1)
        into.append(Argument(name, kind.strip(), bool(has_default)))
    return Schema(head[1], head[2] or "", tuple(positional), tuple(keyword_only))


def parse_signature(line: str) -> Schema:
    """``torch_npu.npu.name(arg, other=default, *args)``; types are not known."""
    name, _, arguments = line.partition("(")
    function = ast.parse(f"def f({arguments}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    own = function.args
    first_default = len(own.args) - len(own.defaults)
    positional = tuple(Argument(arg.arg, "?", i >= first_default) for i, arg in enumerate(own.args))
    keyword_only = tuple(
        Argument(arg.arg, "?", default is not None)
        for arg, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)
    )
    return Schema(name, "", positional, keyword_only, takes_more=bool(own.vararg or own.kwarg))


def kinds_of(node: ast.expr, kinds_of_name: Callable[[str], Kinds]) -> Kinds:
    """What an expression is; ``kinds_of_name`` knows the names around it."""

    def of(part: ast.expr) -> Kinds:
        return kinds_of(part, kinds_of_name)

    match node:
        case ast.Constant(value=value):
            return frozenset({"None" if value is None else type(value).__name__})
        case ast.Name(id=name):
            return kinds_of_name(name)
        case ast.JoinedStr():
            return frozenset({"str"})
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return frozenset({_list_of([of(part) for part in parts])})
        case ast.ListComp(elt=part):
            return frozenset({_list_of([of(part)])})
        case ast.IfExp(body=one, orelse=other):
            return of(one) | of(other) if of(one) and of(other) else UNKNOWN
        case ast.UnaryOp(op=ast.USub(), operand=part):
            return of(part)
        case ast.UnaryOp(op=ast.Not()):
            return frozenset({"bool"})
        case ast.BinOp(left=left, right=right):
            return _of_operation(of(left), of(right), node.op)
        case ast.Attribute(attr="shape"):
            return frozenset({"list[int]"})
        case ast.Attribute(attr="dtype"):
            return frozenset({"dtype"})
        case ast.Attribute() if DTYPES.fullmatch(ast.unparse(node)):
            return frozenset({"dtype"})
        case ast.Subscript(value=part, slice=index):
            return _of_item(of(part), index)
        case ast.Call(func=function):
            return _of_call(function)
    return UNKNOWN


def kinds_of_annotation(node: ast.expr | None) -> Kinds:
    """``Tensor | None`` counts as Tensor: the code around knows when it is None."""
    if isinstance(node, ast.BinOp):
        return kinds_of_annotation(node.left) | kinds_of_annotation(node.right)
    text = ast.unparse(node) if node is not None else ""
    text = text.replace("torch.Tensor", "Tensor").replace("torch.dtype", "dtype")
    if text in ("Tensor", "int", "float", "bool", "str", "dtype"):
        return frozenset({text})
    element = re.fullmatch(r"(?:list|tuple|Sequence)\[(\w+)(?:, ?\.\.\.)?\]", text)
    return frozenset({f"list[{element[1]}]"}) if element else UNKNOWN


def _list_of(elements: list[Kinds]) -> str:
    if not elements:
        return "list[]"
    kinds = frozenset().union(*elements)
    return f"list[{next(iter(kinds))}]" if all(elements) and len(kinds) == 1 else "list[?]"


def _of_operation(left: Kinds, right: Kinds, operator: ast.operator) -> Kinds:
    if "Tensor" in left | right:
        return frozenset({"Tensor"})
    if not left or not right:
        return UNKNOWN
    if isinstance(operator, ast.Mult) and any(kind.startswith("list") for kind in left):
        return left
    if left | right <= {"int", "float"}:
        is_float = isinstance(operator, ast.Div | ast.Pow) or "float" in left | right
        return frozenset({"float" if is_float else "int"})
    return UNKNOWN


def _of_item(kinds: Kinds, index: ast.expr) -> Kinds:
    if kinds == {"Tensor"}:
        return kinds
    element = re.fullmatch(r"list\[(\w+)\]", next(iter(kinds))) if len(kinds) == 1 else None
    if element is None:
        return UNKNOWN
    return kinds if isinstance(index, ast.Slice) else frozenset({element[1]})


def _of_call(function: ast.expr) -> Kinds:
    if isinstance(function, ast.Name) and function.id in BUILTINS:
        return frozenset({BUILTINS[function.id]})
    if isinstance(function, ast.Attribute):
        if ast.unparse(function.value) == "torch":
            return frozenset({"Tensor"}) if function.attr in TENSOR_FACTORIES else UNKNOWN
        if function.attr == "tolist":
            return frozenset({"list[?]"})
        if function.attr in TENSOR_METHODS:
            return frozenset({"Tensor"})
    return UNKNOWN
