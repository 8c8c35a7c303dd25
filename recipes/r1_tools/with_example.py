"""The tools of ``tools.yaml`` for a model whose chat template shows none: examples begin every conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.r1_tools.r1_tools import INSTRUCTION
from verl.experimental.agent_loop.environment import Message
from verl.experimental.agent_loop.tool_environment import ToolEnvironment
from verl.workers.rollout.environment_host import tool_entries

_ANSWERS = {"248 * 31": "7688", "2 + 5": "7", "617 * 43": "26531", "4 + 3": "7"}
_IN_THE_HEAD = "2 + 5"  # with a second one the smallest models call nothing


def _example(expression: str, answer: str) -> Iterator[Message]:
    yield {"role": "user", "content": f"What is {expression}?{INSTRUCTION}"}
    if expression != _IN_THE_HEAD:
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        yield {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"}
        yield {"role": "tool", "name": "calculator", "content": answer}
    yield {"role": "assistant", "content": f"#### {answer}"}


EXAMPLES = [message for pair in _ANSWERS.items() for message in _example(*pair)]


class WithExample(ToolEnvironment):
    """Its tools are those of the recipe, one call a turn."""

    def __init__(self) -> None:
        super().__init__(tool_entries(str(Path(__file__).with_name("tools.yaml"))), 1, 256, "middle")

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        return [*EXAMPLES, *await super().reset(row, seed)]
