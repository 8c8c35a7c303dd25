"""Config classes that read like dicts: the base of a user's (upstream: ``verl.base_config``), and of our sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

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
