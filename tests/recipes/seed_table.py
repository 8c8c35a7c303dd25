"""A recipe's table of its upstream's parameters: what it says, and whether the resolved config says the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from tools.launch.ray_node import npu_variables
from verl.trainer.config import PPOTrainerConfig, validate_config


@dataclass(frozen=True)
class Row:
    """One parameter. ``key`` is empty where upstream's has no counterpart; ``note`` says what differs, if anything."""

    name: str
    upstream: str
    key: str
    ours: str
    note: str


_SAME = re.compile(r"`(?P<key>[^`]+)`(?P<star>(?: \*)?)(?: \((?P<name>.+)\))?")


def tables_after(page: str, heading: str) -> list[Row]:
    """Rows of both tables after ``heading``: five columns where something differs, key and value where nothing does.

    A row of the second kind has its parameter's name in brackets, or no name where the key ends with it.
    """
    section = page[page.index(heading) + len(heading) :].split("\n## ")[0]
    rows = []
    for line in re.findall(r"^\|.*\|$", section, re.MULTILINE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if set(line) <= set("|-") or "key" in cells:
            continue
        if len(cells) == 2:
            same = _SAME.fullmatch(cells[0])
            assert same is not None, line
            rows.append(Row((same["name"] or "").strip("`"), "", same["key"] + same["star"], cells[1], ""))
        else:
            assert len(cells) == 5, line
            rows.append(Row(*(cell.strip("`") for cell in cells)))
    return rows


def _named(row: Row, seed: Mapping[str, str]) -> Row:
    """A row of equal values with its name, the longest of the seed's that its key ends with, and the seed's value."""
    if row.upstream or row.note or not row.key:
        return row
    key = row.key.removesuffix(" *")
    name = row.name or max((n for n in seed if f".{key}".endswith(f".{n}")), key=len, default="")
    return replace(row, name=name, upstream=seed.get(name, "")) if name else row


def check_table(rows: list[Row], seed: Mapping[str, str], config_of: Callable[..., PPOTrainerConfig]) -> None:
    """Every parameter of the seed once with its value; every key with its resolved value; every difference named."""
    rows = [_named(row, seed) for row in rows]
    assert sorted(row.name for row in rows) == sorted(seed), "the tables have the seed's parameters"
    config, accepted = config_of(), []
    resolved = asdict(config)
    for row in rows:
        assert row.upstream == seed[row.name], row
        if not row.key:
            assert row.note, f"{row.name} has no key and no word of what stands in its place"
            continue
        wanted = _value(row.ours)
        if row.key == "npu_env.sh":
            assert npu_variables({})[row.name] == row.ours, row
        elif row.key.endswith("*"):
            accepted.append(f"{row.key.rstrip('*` ')}={row.ours}")
        else:
            value: Any = resolved
            for part in row.key.split("."):
                value = value[part]
            assert value == wanted, f"{row.key} is {value!r}; the table says {row.ours}"
        if not row.note:
            assert _value(row.upstream) == wanted, f"{row.name} differs, and the table does not say how"
    assert validate_config(config_of(*accepted)) == validate_config(config), "upstream's values of starred keys"


def _value(text: str) -> Any:
    """YAML, with ``1e-6`` as the number that it is elsewhere, ``~/`` as the home directory, and a set flag as True."""
    if text == "set":
        return True
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(os.path.expanduser(text) if text.startswith("~/") else text)
