"""Enumerations to which users add entries (upstream: ``verl.utils.py_functional``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class DynamicEnumMeta(type):
    """Makes a ``DynamicEnum`` class iterable and indexable by name, like an enumeration."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        return item in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def __len__(cls) -> int:
        return len(cls._registry)

    def names(cls) -> list[str]:
        return list(cls._registry)

    def values(cls) -> list[Any]:
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """An enumeration to which users add entries; a subclass sets ``_registry = {}`` and ``_next_value = 0`` of its own.

    Entries of one name are one object in a process; they are pickled by their name.
    """

    _registry: ClassVar[dict[str, DynamicEnum]] = {}
    _next_value: ClassVar[int] = 0

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _entry_of, (type(self), self.name)

    @classmethod
    def register(cls, name: str) -> DynamicEnum:
        """Adds an entry, which is ``cls.NAME`` from now on; ValueError when there is one."""
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{cls.__name__}.{key} already exists; entries: {cls.names()}")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        cls._next_value += 1
        setattr(cls, key, member)
        return member

    @classmethod
    def remove(cls, name: str) -> DynamicEnum:
        """Takes an entry away and returns it; KeyError when there is none."""
        member = cls._registry.pop(name.upper())
        delattr(cls, name.upper())
        return member

    @classmethod
    def from_name(cls, name: str) -> DynamicEnum | None:
        """The entry of that name, in any case; None when there is none."""
        return cls._registry.get(name.upper())


def _entry_of(cls: type[DynamicEnum], name: str) -> DynamicEnum:
    return cls.from_name(name) or cls.register(name)
