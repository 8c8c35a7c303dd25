"""Config classes that read like dicts: the base of a user's (upstream: ``verl.base_config``), and of our sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar

from verl.utils.errors import MissingFieldError


class FieldMapping(Mapping):
    """The fields of a dataclass, read like those of a dict."""

    def get(self, key: str, default: Any = None) -> Any:
        """The field ``key``; ``default`` when there is none."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        """The field ``key``; a KeyError, which is an AttributeError as well, when there is none."""
        try:
            return getattr(self, key)
        except AttributeError as error:
            raise MissingFieldError(key) from error

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(fields(self))  # type: ignore[arg-type]


@dataclass
class BaseConfig(FieldMapping):
    """A dataclass that reads like a dict, and whose fields cannot be changed once they are set.

    A subclass names in ``_mutable_fields`` those that can. ``_target_`` is the class that a YAML file asks for.
    """

    _mutable_fields: ClassVar[set[str]] = set()
    _target_: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"Field '{name}' of {type(self).__name__} is frozen; build a new one instead")
        super().__setattr__(name, value)
