"""How a key of the config is declared: ``name: type = key(default, check, ...)``, and above it ``#:`` with its meaning.

Its validation, upstream's names for it, when it is listed as without effect, and docs/parameters.md follow from that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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


def names_of(*choices: str) -> Values:
    return Values(f"expected names out of {', '.join(choices)}", lambda names: set(names) <= set(choices))


def between(least: float, most: float) -> Values:
    return Values(f"it must be between {least:g} and {most:g}", lambda value: least <= value <= most)


TRAINED_DTYPES = Values(
    "expected one of bfloat16, float32 (no float16 training, which would have to scale its loss)",
    ("bfloat16", "float32").__contains__,
)
NOT_NEGATIVE = Values("it must not be negative", lambda value: value >= 0)
SHARE = Values("expected (0, 1]", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class Idle:
    """Why a key that is given changes nothing, and when."""

    reason: str  #: for the user; ``{where}`` in it becomes the dotted name of the key's section.
    holds: Callable[[Any, Any], Any]  #: whether it is so, of the whole config and the key's section.


def beside(name: str, value: Any) -> Idle:
    """A key changes nothing where the key ``name`` of its section is ``value``; None means that it is not given."""
    is_so = "is not given" if value is None else f"is {value}"
    return Idle(f"{{where}}.{name} {is_so}", lambda run, own: getattr(own, name) == value)


@dataclass(frozen=True)
class Key:
    """What is declared of a key besides its type, default and meaning; of a section, what holds for all of its keys."""

    #: the values that it accepts, besides None, which means that it is not given; and reasons why it changes nothing,
    #: of which the first one that holds is reported.
    rules: tuple[Values | Idle, ...] = ()
    #: upstream's version -> the key's name there, from the key's section on; ``../`` is the section around it.
    names: Mapping[str, str] = field(default_factory=dict)
    is_path: bool = False  #: a leading ``~`` is expanded.
    members: Mapping[str, Key] = field(default_factory=dict)  #: the keys of a free section, a ``dict``.
    takes_names: bool = False  #: it may be a ``dict`` with keys of the user's own, besides its ``members``.
    not_of_reference: str = ""  #: why ``ref.megatron`` has no use of it.

    @property
    def checks(self) -> list[Values]:
        return [rule for rule in self.rules if isinstance(rule, Values)]

    @property
    def idle(self) -> list[Idle]:
        return [rule for rule in self.rules if isinstance(rule, Idle)]

    def problems(self, name: str, value: Any) -> Iterator[str]:
        """One sentence for each reason why ``value`` cannot be that of the key called ``name``."""
        if value is None:
            return
        for check in self.checks:
            if not check.accepts(value):
                yield f"{name} is {value!r}; {check.expected}"
        for inner, given in flat(value, whole=frozenset(self.members)) if self.members else ():
            if inner in self.members:
                yield from self.members[inner].problems(f"{name}.{inner}", given)
            elif not self.takes_names and (
                given is not None or not any(member.startswith(f"{inner}.") for member in self.members)
            ):
                yield f"{name}.{inner} is not known here; known: {', '.join(sorted(self.members))}"


def key(default: Any, *rules: Values | Idle, **declared: Any) -> Any:
    """A field of a section: its default, or the function that makes it; its check and idle rules; what ``Key`` has."""
    metadata = {"key": Key(rules, **declared)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def members(**table: Values | tuple[Values | Idle, ...]) -> dict[str, Key]:
    """The keys of a free section, each with its check, or with its check and its idle rules."""
    return {name: Key(rules if isinstance(rules, tuple) else (rules,)) for name, rules in table.items()}


def declaration(item: dataclasses.Field[Any]) -> Key:
    """What is declared of a field; a plain default declares nothing more."""
    found: Key = item.metadata.get("key", Key())
    return found


def flat(tree: Mapping[str, Any], prefix: str = "", whole: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """The dotted keys of ``tree`` with their values; a section that is empty or among ``whole`` is one value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and prefix + str(name) not in whole:
            yield from flat(value, f"{prefix}{name}.", whole)
        else:
            yield f"{prefix}{name}", value


class Section(FieldMapping):
    """Base of the sections of the config; its keys are read as attributes or as those of a dict."""

    def problems(self, where: str) -> list[str]:
        """Every value of this section and of those in it that cannot work, one sentence each."""
        found, inner = list[str](), list[str]()
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = f"{where}.{item.name}", getattr(self, item.name)
            if isinstance(value, Section):
                inner += value.problems(name)
            else:
                found += declaration(item).problems(name, value)
        return [*found, *self.contradictions(where), *inner]

    def contradictions(self, where: str) -> Iterator[str]:
        """What cannot work together in this section, one sentence each."""
        yield from ()
