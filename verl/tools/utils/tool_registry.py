"""For agent loops of users: the tools of a file (upstream: ``verl.tools.utils.tool_registry``)."""

from __future__ import annotations

from verl.experimental.agent_loop.tool_environment import load_tool
from verl.tools.base_tool import BaseTool
from verl.workers.rollout.environment_host import tool_entries


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Those that ``multi_turn.tool_config_path`` lists; ValueError says what is wrong with the file."""
    return [load_tool(entry) for entry in tool_entries(tools_config_file)]
