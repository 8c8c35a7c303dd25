"""The environment of a model that calls tools and then answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.environment import Message
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.dataset.rl_dataset import truncated
from verl.utils.import_utils import load_extern_type

_tools_by_config: dict[str, dict[str, BaseTool]] = {}  # one set of tools serves all samples of a process


class ToolEnvironment:
    """Runs the calls of a turn and returns their results as messages of the role ``tool``; a turn without a call ends.

    Args:
        tools: entries of ``multi_turn.tool_config_path``: ``class_name``, ``config`` and perhaps ``tool_schema``.
        max_parallel_calls: calls of one turn that are made; the others are answered by an error.
        max_response_length, truncate_side: characters of a result, and which end of a longer one is kept.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], max_parallel_calls: int, max_response_length: int, truncate_side: str
    ) -> None:
        self._tools = _loaded(tools)
        self.tools = [tool.tool_schema.model_dump() for tool in self._tools.values()]
        self._max_calls, self._length, self._side = max_parallel_calls, max_response_length, truncate_side
        self._arguments: Mapping[str, Any] = {}
        self._instances: dict[str, str] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        self._arguments = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        return list(row["messages"])

    async def step(self, action: Message) -> tuple[list[Message], float, bool, dict[str, float]]:
        calls = action.get("tool_calls") or []
        if not calls:
            rewards = [await self._tools[name].calc_reward(one) for name, one in self._instances.items()]
            return [], float(sum(rewards)), True, {}
        results = await asyncio.gather(*(self._made(number, call) for number, call in enumerate(calls)))
        info = {"tool_calls": float(len(calls)), "failed_calls": float(sum(failed for *_, failed in results))}
        return [message for message, *_ in results], float(sum(reward for _, reward, _ in results)), False, info

    async def close(self) -> None:
        for name, instance in self._instances.items():
            await self._tools[name].release(instance)

    async def _made(self, number: int, call: Mapping[str, Any]) -> tuple[Message, float, bool]:
        """The message, the reward, and whether the model's call could not be made."""
        name, problem, parameters = str(call["function"]["name"]), "", {}
        if number >= self._max_calls:
            problem = f"at most {self._max_calls} calls of a turn are made"
        elif name not in self._tools:
            problem = f"there is no tool {name!r:.100}; there is {', '.join(self._tools)}"
        else:
            try:
                parameters = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):
                problem = "the arguments are no JSON"
            if not problem and not isinstance(parameters, dict):
                problem = "the arguments are no JSON object"
        if problem:
            return self._message(name, f"error: {problem}"), 0.0, True
        arguments = self._arguments.get(name) or {}
        if name not in self._instances:
            self._instances[name], _ = await self._tools[name].create(None, **(arguments.get("create_kwargs") or {}))
        extra = arguments.get("execute_kwargs") or {}
        response, reward, _ = await self._tools[name].execute(self._instances[name], parameters, **extra)
        return self._message(name, _text(response)), float(reward), False

    def _message(self, name: str, text: str) -> Message:
        if len(text) > self._length:
            text = "".join(truncated(list(text), self._length, self._side))
        return {"role": "tool", "name": name, "content": text}


def _text(response: ToolResponse | str) -> str:
    text = response if isinstance(response, str) else response.text
    if text is not None and not isinstance(text, str):
        raise ValueError(f"a tool returned {type(text).__name__}; expected a text")
    return text or ""


def _loaded(entries: Sequence[Mapping[str, Any]]) -> dict[str, BaseTool]:
    key = json.dumps(entries, sort_keys=True)
    if key not in _tools_by_config:
        _tools_by_config[key] = {tool.name: tool for tool in map(load_tool, entries)}
    return _tools_by_config[key]


def load_tool(entry: Mapping[str, Any]) -> BaseTool:
    """The tool of an entry of ``multi_turn.tool_config_path``."""
    module, _, name = str(entry["class_name"]).rpartition(".")
    tool_class = load_extern_type(entry.get("path") or f"pkg://{module}", name)
    schema = entry.get("tool_schema")
    given = OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    made: BaseTool = tool_class(dict(entry.get("config") or {}), given)
    return made
