"""What a model acts in: the class that a user writes, and the forms in which it may answer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from verl.utils.import_utils import load_extern_type

Message: TypeAlias = dict[str, Any]
"""One message of a chat, with ``role`` and ``content``."""


class Environment:
    """Base of environments, one object for each sample; a class of a user's own need not derive from it.

    ``reset`` and ``step`` may be ``async def``: then all samples share a process, and none of them may block.

    Attributes:
        is_deterministic: the same seed and actions give the same observations, so that an environment whose process
            was lost, or whose run is resumed, is rebuilt by replaying its actions.
        takes_token_ids: ``step`` gets the token ids that the model wrote, not a message.
        writes_rows: with token ids, an observation is all that the model goes on from, not what follows its turn.
        tools: OpenAI function schemas that the chat template shows the model.
    """

    is_deterministic = True
    takes_token_ids = False
    writes_rows = False
    tools: Sequence[Mapping[str, Any]] = ()

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | Sequence[int] | str:
        """The beginning of a sample, as messages or token ids; all samples of a prompt get the same ``seed``.

        ``row`` is the data set's, with ``messages`` (its chat), ``ground_truth``, ``data_source`` and ``extra_info``.
        """
        return list(row["messages"])

    def step(self, action: Any) -> tuple[Any, float, bool]:
        """What the action brings: (observation, reward, done).

        ``action`` is the model's message: ``role``, ``content``, and where it called tools ``tool_calls``, as OpenAI's
        interface has them. An observation is a text (of the user), a message, several, or token ids. A dict of numbers
        may follow ``done``: their means over the samples are metrics.
        """
        raise NotImplementedError

    def close(self) -> None:
        """The sample has ended; called once, if the process still runs."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment's class by file; ``kwargs`` are JSON and go to its constructor."""

    path: str
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What ``reset`` or ``step`` gave: ``observation`` is a list of messages or of token ids; ``seconds``: in which."""

    observation: list[Any]
    reward: float = 0.0
    done: bool = False
    info: dict[str, float] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def load_environment(spec: EnvironmentSpec) -> type:
    """The class; ValueError says what it lacks. Its file may raise anything."""
    environment = load_extern_type(spec.path, spec.name)
    missing = [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]
    if not isinstance(environment, type) or missing:
        lack = f"it has no {' and no '.join(missing)}" if missing else f"it is a {type(environment).__name__}"
        raise ValueError(f"{spec.name} of {spec.path}: {lack}; expected a class with reset(row, seed) and step(action)")
    return environment


def is_async(environment: type) -> bool:
    return any(inspect.iscoroutinefunction(getattr(environment, name)) for name in ("reset", "step"))


def beginning(given: Any, tools: Any = ()) -> Outcome:
    """What ``reset`` returned; ValueError when it is no chat."""
    observation = _observation(given, "reset")
    if not observation:
        raise ValueError(f"reset returned {given!r:.100}; expected messages or token ids")
    return Outcome(observation, tools=[dict(tool) for tool in tools])


def outcome(given: Any) -> Outcome:
    """What ``step`` returned; ValueError when it has another form."""
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) not in (3, 4):
        raise ValueError(f"step returned {given!r:.100}; expected (observation, reward, done)")
    reward, info = given[1], given[3] if len(given) == 4 else {}
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"step returned the reward {reward!r:.100}; expected a finite number")
    if not isinstance(given[2], bool):
        raise ValueError(f"step returned done={given[2]!r:.100}; expected True or False")
    numbers = {str(name): float(value) for name, value in info.items() if isinstance(value, (int, float))}
    return Outcome(_observation(given[0], "step"), float(reward), given[2], numbers)


def _observation(given: Any, call: str) -> list[Any]:
    if given is None or isinstance(given, str):
        return [] if given is None else [{"role": "user", "content": given}]
    found = [given] if isinstance(given, Mapping) else list(given) if isinstance(given, Sequence) else None
    if found is not None and not isinstance(given, (bytes, bytearray)):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            return found
        if all(_is_message(item) for item in found):
            return [dict(item) for item in found]
    raise ValueError(f"{call} returned {given!r:.100}; expected a text, messages with role and content, or token ids")


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
