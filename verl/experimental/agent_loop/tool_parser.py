"""For agent loops of users: upstream's names for the tool calls in a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.tool_parsers import TOOL_PARSERS, FunctionCall


class ToolParser:
    """The calls of a form (``multi_turn.format``) in the token ids of a turn."""

    def __init__(self, form: str, tokenizer: Any) -> None:
        self._parser = TOOL_PARSERS[form](tokenizer)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """ValueError for a form that is not known."""
        if name not in TOOL_PARSERS:
            raise ValueError(f"there is no form of tool calls {name!r}; there is {', '.join(TOOL_PARSERS)}")
        return cls(name, tokenizer)

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls."""
        return self._parser.extract_tool_calls(responses_ids)
