"""What a tool takes, as OpenAI's interface writes it, and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpenAIFunctionSchema:
    """A function: its name, what it does, and its parameters as a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}, "required": []})
    strict: bool = False


@dataclass(frozen=True)
class OpenAIFunctionToolSchema:
    """An entry of ``tools``."""

    type: str
    function: OpenAIFunctionSchema

    @classmethod
    def model_validate(cls, given: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
        """From a mapping with ``type`` and ``function``; ValueError says what is wrong."""
        function = given.get("function")
        if given.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise ValueError(f"tool_schema is {dict(given)!r:.200}; expected type function, and function with a name")
        known = {item.name for item in dataclasses.fields(OpenAIFunctionSchema)}
        return cls("function", OpenAIFunctionSchema(**{name: function[name] for name in known & set(function)}))

    def model_dump(self, **unused: Any) -> dict[str, Any]:
        """As a chat template gets it."""
        shown = {name: value for name, value in dataclasses.asdict(self.function).items() if name != "strict"}
        return {"type": self.type, "function": shown}


@dataclass(frozen=True)
class ToolResponse:
    """What the model is shown of a call."""

    text: str | None = None
