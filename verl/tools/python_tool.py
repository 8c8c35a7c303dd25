"""The sandbox for Python programs as a tool."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score.sandbox import SandboxLimits, run_program


class PythonTool(BaseTool):
    """Runs ``code`` and returns what it printed; ``config`` has ``timeout_s`` and ``max_parallel`` programs."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        timeout_s = float(config.get("timeout_s", 4.0))
        self._limits = SandboxLimits(wall_s=timeout_s, cpu_s=max(1, round(timeout_s)))
        self._free = asyncio.Semaphore(int(config.get("max_parallel", 4)))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {"type": "string", "description": "a Python program that prints its result"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": "python", "description": "Runs a program.", "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, float]]:
        code = parameters.get("code")
        if not isinstance(code, str):
            return ToolResponse("error: expected a program as text"), 0.0, {"failed": 1.0}
        async with self._free:
            result = await asyncio.to_thread(run_program, code, limits=self._limits)
        text = result.stdout if result.status == "ok" else f"{result.stdout}{result.stderr}\n{result.status}"
        return ToolResponse(text), 0.0, {"failed": float(result.status != "ok")}
