"""Bash's arithmetic of whole numbers of 64 bits, as far as launch scripts use it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_LARGEST = 2**63
_MOST_CHARACTERS = 400
_UNKNOWN = re.compile(r"[^\w\s()+*/%-]|(?<!\w)\d+[A-Za-z_]")
_REASON = "not an expression of + - * / % ** and whole numbers"
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: lambda one, other: abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1),
    ast.Mod: lambda one, other: abs(one) % abs(other) * (1 if one >= 0 else -1),
    ast.Pow: lambda one, other: one**other if 0 <= other < 64 else _LARGEST,
}


def calculate(expression: str, value: Callable[[str], int]) -> int:
    """The value of an expression; ``value`` gives a variable's. ValueError with the reason where it has none."""
    if len(expression) > _MOST_CHARACTERS or _UNKNOWN.search(expression):
        raise ValueError(_REASON)
    try:
        return _calculated(ast.parse(expression.strip() or "0", mode="eval").body, value)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(_REASON) from None


def _calculated(node: ast.expr, value: Callable[[str], int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    elif isinstance(node, ast.Name):
        result = value(node.id)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        result = _calculated(node.operand, value) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_calculated(node.left, value), _calculated(node.right, value))
    else:
        raise SyntaxError
    if not -_LARGEST <= result < _LARGEST:
        raise ValueError("beyond 64 bits")
    return result
