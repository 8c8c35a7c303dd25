"""What the sections declare, for the whole tree: every key by its dotted name, other names, and reasons to be idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.fixed_keys import WithoutEffect
from verl.workers.config.keys import Idle, Key, declaration, flat


@dataclass(frozen=True)
class Declared:
    """A key with a value of its own."""

    type: str  #: its annotation, as it is written.
    default: Any  #: its value where none is given.
    key: Key  #: what is declared of it.
    #: the rules under which it changes nothing, its sections' first, each with the section that it speaks of.
    idle: tuple[tuple[str, Idle], ...]

    @property
    def is_free(self) -> bool:
        """Whether it may hold a ``dict``."""
        return isinstance(self.default, dict) or self.key.takes_names


@cache
def declared_keys() -> dict[str, Declared]:
    """Every key of the schema by its dotted name."""
    return dict(_declared(PPOTrainerConfig, "", ()))


def _declared(cls: type, prefix: str, outer: tuple[tuple[str, Idle], ...]) -> Iterator[tuple[str, Declared]]:
    for field in dataclasses.fields(cls):
        default = field.default_factory() if callable(field.default_factory) else field.default
        key = declaration(field)
        idle = (*outer, *((prefix.rstrip("."), rule) for rule in key.idle))
        if dataclasses.is_dataclass(default):
            yield from _declared(type(default), f"{prefix}{field.name}.", idle)
        else:
            yield prefix + field.name, Declared(str(field.type), default, key, idle)


@cache
def other_names() -> dict[str, str]:
    """Upstream's names of keys -> the key; a name that is a key itself here stays one."""
    keys = declared_keys()
    found = {_from_section(name, other): name for name, item in keys.items() for other in item.key.names.values()}
    return {other: name for other, name in found.items() if other not in keys}


def _from_section(name: str, other: str) -> str:
    """``other`` from the section of the key ``name`` on, where each ``../`` goes one section up."""
    section = name.split(".")[:-1]
    while other.startswith("../"):
        section, other = section[:-1], other.removeprefix("../")
    return ".".join([*section, other])


def idle_keys(config: PPOTrainerConfig, given: Mapping[str, Any]) -> Iterator[WithoutEffect]:
    """Those of the ``given`` keys that change nothing in this run, with the first reason; None means not given."""
    for name, item in declared_keys().items():
        for key, value in flat({name: given.get(name)}):
            if value in (None, {}):
                continue
            member = item.key.members.get(key.removeprefix(f"{name}."), Key())
            for where, rule in (*item.idle, *((name.rpartition(".")[0], rule) for rule in member.idle)):
                section = reduce(getattr, filter(None, where.split(".")), config)
                if rule.holds(config, section):
                    yield WithoutEffect(key, value, rule.reason.replace("{where}", where))
                    break
