"""Config of samples of several turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.workers.config.keys import Idle, Section, Values, at_least, key, one_of

_ONE_TURN = Idle("{where}.enable is False: an answer is a single turn", lambda run, own: not own.enable)
_NO_TOOLS = Idle("{where}.tool_config_path is not given", lambda run, own: own.tool_config_path is None)
_MOST = Values("give a number above 0, or leave it out for no limit", lambda value: value > 0)

SINGLE_TURN, TOOLS = "single_turn_agent", "tool_agent"  # upstream's names of what needs no loop of a user's


@dataclass(frozen=True)
class EnvironmentConfig(Section):
    """The environment that samples act in, a class of the user's own."""

    path: str | None = key(None, is_path=True)  #: its Python file; absent means the tools of ``tool_config_path``.
    name: str = "Environment"  #: name of the class in that file.
    kwargs: dict[str, Any] = key(dict, takes_names=True)  #: arguments of its constructor.
    #: processes of environments whose calls block, on each replica; those with ``async def`` share one.
    num_processes: int = key(4, at_least(1))
    #: seconds that one call of an environment may take before its sample is given up.
    timeout_s: float = key(60.0, _MOST)


@dataclass(frozen=True)
class MultiTurnConfig(Section):
    """Samples of several turns: the model acts, its environment answers."""

    enable: bool = False  #: generate by turns, in the environment of ``environment`` or ``tool_config_path``.
    environment: EnvironmentConfig = key(EnvironmentConfig, _ONE_TURN)
    #: YAML file of the tools that the model may call, in verl's form; the sample ends with the turn that calls none.
    tool_config_path: str | None = key(None, _ONE_TURN, is_path=True)
    #: form of the model's tool calls: ``hermes`` (Qwen), ``deepseek_v3`` or ``llama3_json``.
    format: str = key("hermes", _ONE_TURN, one_of("hermes", "deepseek_v3", "llama3_json"))
    max_assistant_turns: int | None = key(None, _ONE_TURN, _MOST)  #: turns of the model after which a sample ends.
    max_user_turns: int | None = key(None, _ONE_TURN, _MOST)  #: answers of the environment after which one ends.
    max_tool_calls: int | None = key(None, _ONE_TURN, _MOST)  #: tool calls of a sample after which it ends.
    max_seconds: float | None = key(None, _ONE_TURN, _MOST)  #: seconds after which a sample ends with its turn.
    max_parallel_calls: int = key(1, _ONE_TURN, _NO_TOOLS, at_least(1))  #: tool calls of one turn that are made.
    max_tool_response_length: int = key(256, _ONE_TURN, _NO_TOOLS, at_least(1))  #: characters of a tool's answer.
    #: which part of a longer answer is kept: ``left`` (its end), ``middle`` (both ends) or ``right`` (its beginning).
    tool_response_truncate_side: str = key("middle", _ONE_TURN, _NO_TOOLS, one_of("left", "middle", "right"))
    #: where the template changes earlier tokens of a sample, as some leave out old thoughts: ``split`` goes on in a new
    #: row, which is trained on beside the one before; ``refuse`` ends the sample.
    on_changed_history: str = key("split", _ONE_TURN, one_of("split", "refuse"))
    #: wait for all answers of a step of the engine before the next, so that a run can be repeated to the last bit.
    fixed_order: bool = key(False, _ONE_TURN)

    @property
    def splits(self) -> bool:
        return self.enable and self.on_changed_history == "split"


@dataclass(frozen=True)
class AgentConfig(Section):
    """Agent loops of the user's own (docs/turns.md)."""

    #: the loop of rows without ``agent_name``: a name of ``agent_loop_config_path``, or one that
    #: ``model.external_lib`` registers.
    default_agent_loop: str = SINGLE_TURN
    agent_loop_config_path: str | None = key(None, is_path=True)  #: YAML file of agent loops, in verl's form.

    @property
    def has_loops(self) -> bool:
        return self.agent_loop_config_path is not None or self.default_agent_loop not in (SINGLE_TURN, TOOLS)
