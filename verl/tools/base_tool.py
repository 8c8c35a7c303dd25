"""The shape of a tool."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A tool; one object serves all samples of its process, and ``instance_id`` tells them apart.

    Args:
        config: the section ``config`` of its entry in ``multi_turn.tool_config_path``.
        tool_schema: the entry's ``tool_schema``; without one, ``get_openai_tool_schema`` has it.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = self.get_openai_tool_schema() if tool_schema is None else tool_schema
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """What the model is shown of the tool."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """A sample begins; ``kwargs`` are the row's ``extra_info.tools_kwargs.<name>.create_kwargs``."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        """One call: (what the model is shown, the reward of this turn, metrics)."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Added to the reward of the last turn."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The sample has ended."""
