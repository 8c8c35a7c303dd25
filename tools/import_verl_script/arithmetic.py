"""Bash's arithmetic of whole numbers of 64 bits, as far as launch scripts use it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_ALLOWED = re.compile(r"[\d\s()+*/%-]{0,400}")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.Div: lambda one, other: abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1),
    ast.Mod: lambda one, other: abs(one) % abs(other) * (1 if one >= 0 else -1),
}


def calculate(expression: str) -> int:
    """The value of an expression of numbers; ValueError with the reason where it has none."""
    try:
        if not _ALLOWED.fullmatch(expression):
            raise SyntaxError
        return _calculated(ast.parse(" ".join(expression.split()) or "0", mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression of + - * / % and whole numbers") from None


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        result = _calculated(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_calculated(node.left), _calculated(node.right))
    else:
        raise SyntaxError
    if not -(2**63) <= result < 2**63:
        raise ValueError("beyond 64 bits")
    return result
