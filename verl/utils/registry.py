"""Implementations by the name that a config key selects them with."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

Entry = TypeVar("Entry")
Given = TypeVar("Given")


class Registry(Generic[Entry]):
    """The only list of the names that a config key may have; ``entries`` is it as a dict.

    Args:
        key: the config key.
        what: what is registered, for messages.
    """

    def __init__(self, key: str, what: str) -> None:
        self.key = key
        self._what = what
        self.entries: dict[str, Entry] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self.entries)

    def register(self, name: str | Enum) -> Callable[[Given], Given]:
        """Decorator that registers a function or a class as ``name``; a name can be taken once."""
        key = _text(name)

        def decorate(entry: Given) -> Given:
            taken: Any = self.entries.setdefault(key, cast(Entry, entry))
            if taken is not entry:
                raise ValueError(f"{self._what} {key!r} is registered already, by {taken.__module__}")
            return entry

        return decorate

    def get(self, name: str | Enum) -> Entry:
        """The entry of that name; ValueError lists the known ones."""
        key = _text(name)
        if key not in self.entries:
            raise ValueError(f"Unknown {self._what}: {key}. {self.key} is {key!r}; known: {', '.join(self.names)}")
        return self.entries[key]


def _text(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name
