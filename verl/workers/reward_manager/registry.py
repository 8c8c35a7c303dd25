"""The table of reward managers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_MANAGERS: dict[str, type] = {}
Manager = TypeVar("Manager", bound=type)


def register(name: str) -> Callable[[Manager], Manager]:
    """Class decorator: known as ``reward_model.reward_manager=name``."""

    def decorate(cls: Manager) -> Manager:
        _MANAGERS[name] = cls
        return cls

    return decorate


def get_reward_manager_cls(name: str) -> type:
    """The manager of that name; ValueError lists the known ones."""
    if name not in _MANAGERS:
        raise ValueError(f"reward_model.reward_manager is {name!r}; known: {', '.join(sorted(_MANAGERS))}")
    return _MANAGERS[name]
