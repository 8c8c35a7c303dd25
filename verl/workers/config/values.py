"""The values that the keys of a section accept, as tables, and the base of all sections that checks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from verl.base_config import FieldMapping


@dataclass(frozen=True)
class Values:
    """The values that a key accepts, in words that end a sentence, and as a test."""

    expected: str
    accepts: Callable[[Any], bool]


def one_of(*choices: str) -> Values:
    return Values(f"expected one of {', '.join(choices)}", lambda value: value in choices)


def at_least(least: float) -> Values:
    return Values(f"it must be at least {least:g}", lambda value: value >= least)


def above(least: float) -> Values:
    return Values(f"it must be above {least:g}", lambda value: value > least)


def between(least: float, most: float) -> Values:
    return Values(f"it must be between {least:g} and {most:g}", lambda value: least <= value <= most)


TRAINED_DTYPES = Values(
    "expected one of bfloat16, float32 (no float16 training, which would have to scale its loss)",
    ("bfloat16", "float32").__contains__,
)
NOT_NEGATIVE = Values("it must not be negative", lambda value: value >= 0)


def value_problems(where: str, given: Mapping[str, Any], known: Mapping[str, Values]) -> list[str]:
    """One sentence for every value that its key does not accept; None means "unset"."""
    return [
        f"{where}.{key} is {value!r}; {known[key].expected}"
        for key, value in given.items()
        if value is not None and key in known and not known[key].accepts(value)
    ]


class Section(FieldMapping):
    """Base of the sections of the config; its keys are read as attributes or as those of a dict.

    Attributes:
        VALUES: key -> the values that it accepts.
    """

    VALUES: ClassVar[Mapping[str, Values]] = {}

    def problems(self, where: str) -> list[str]:
        """Every value of this section and of those in it that cannot work, one sentence each."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        found = [*value_problems(where, given, self.VALUES), *self.contradictions(where)]
        inner = {key: value for key, value in given.items() if isinstance(value, Section)}
        return found + [problem for key, part in inner.items() for problem in part.problems(f"{where}.{key}")]

    def contradictions(self, where: str) -> list[str]:
        """What cannot work together in this section, one sentence each."""
        return []
