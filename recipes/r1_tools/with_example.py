"""The tools of ``tools.yaml`` for a model whose chat template shows none: an example begins every conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.r1_tools.r1_tools import INSTRUCTION
from verl.experimental.agent_loop.environment import Message
from verl.experimental.agent_loop.tool_environment import ToolEnvironment
from verl.workers.rollout.environment_host import tool_entries

_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "248 * 31"}}\n</tool_call>'
EXAMPLE: tuple[Message, ...] = (
    {"role": "user", "content": f"What is 248 * 31?{INSTRUCTION}"},
    {"role": "assistant", "content": _CALL},
    {"role": "tool", "name": "calculator", "content": "7688"},
    {"role": "assistant", "content": "#### 7688"},
    {"role": "user", "content": f"What is 2 + 5?{INSTRUCTION}"},
    {"role": "assistant", "content": "#### 7"},
)


class WithExample(ToolEnvironment):
    """Its tools are those of the recipe, one call a turn."""

    def __init__(self) -> None:
        super().__init__(tool_entries(str(Path(__file__).with_name("tools.yaml"))), 1, 256, "middle")

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return [*EXAMPLE, *await super().reset(row, seed)]
