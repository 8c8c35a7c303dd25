"""A calculator: exact arithmetic of whole numbers, fractions as decimals."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_MAX_DIGITS = 1000
_MAX_CHARS = 500
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorTool(BaseTool):
    """Computes ``expression``: numbers, + - * / // % ** and brackets."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        expression = {"type": "string", "description": "an arithmetic expression, such as (12 + 30) * 7"}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        function = {"name": "calculator", "description": "Computes an expression.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        try:
            text = str(computed(parameters.get("expression")))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
            return ToolResponse(f"error: {error}"), 0.0, {"failed": 1.0}
        return ToolResponse(text), 0.0, {"failed": 0.0}


def computed(expression: Any) -> int | float:
    """The value of an arithmetic expression; nothing of it is executed as Python."""
    if not isinstance(expression, str) or len(expression) > _MAX_CHARS:
        raise ValueError(f"expected an expression of at most {_MAX_CHARS} characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"{ast.unparse(node)!r:.60} is no arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int):
        if exponent >= 0 and base.bit_length() * exponent > 4 * _MAX_DIGITS:
            raise ValueError(f"a number of more than {_MAX_DIGITS} digits")
    elif base < 0:
        raise ValueError("a fractional power of a negative number")
    return _checked(base**exponent)


def _checked(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > 4 * _MAX_DIGITS:
        raise ValueError(f"a number of more than {_MAX_DIGITS} digits")
    return value
