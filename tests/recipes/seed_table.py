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


_SETTING = re.compile(r"(?P<key>[\w.]+)=(?P<value>.*?)(?:  # (?P<remark>.+))?")


def rows_after(page: str, heading: str) -> list[Row]:
    """The rows after ``heading``: of its table, where something differs, and of its blocks, where nothing does.

    A table has five columns, or four where upstream's name is the key. A block has lines ``key=value  # remark`` (the
    remark is upstream's name, or where a variable is set); the line before it says whether they have an effect, which a
    star after the key stands for.
    """
    section = page[page.index(heading) + len(heading) :].split("\n## ")[0]
    rows = []
    for line in re.findall(r"^\| `.*\|$", section, re.MULTILINE):
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        assert len(cells) in (4, 5), line
        rows.append(Row(*(cells if len(cells) == 5 else [cells[0], cells[1], cells[0], *cells[2:]])))
    for introduction, block in re.findall(r"([^\n]+):\n\n```text\n(.*?)```", section, re.DOTALL):
        is_idle = re.search("without effect|changes nothing", introduction, re.IGNORECASE)
        for line in block.splitlines():
            found = _SETTING.fullmatch(line)
            assert found is not None, line
            name, key = found["remark"] or "", found["key"] + (" *" if is_idle else "")
            name, key = (key, name) if name == "npu_env.sh" else (name, key)
            rows.append(Row(name, found["value"], key, found["value"], ""))
    return rows


def _named(row: Row, seed: Mapping[str, str]) -> Row:
    """The row by its parameter's name, which is its remark, else the longest of the seed's that its key ends with."""
    if row.name in seed:
        return row
    key = row.key.removesuffix(" *")
    return replace(row, name=max((name for name in seed if f".{key}".endswith(f".{name}")), key=len, default=""))


def check_table(rows: list[Row], seed: Mapping[str, str], config_of: Callable[..., PPOTrainerConfig]) -> None:
    """Every parameter of the seed once with its value; every key with its resolved value; every difference named."""
    rows = [_named(row, seed) for row in rows]
    assert sorted(row.name for row in rows) == sorted(seed), "the page has the seed's parameters"
    config, accepted = config_of(), []
    resolved = asdict(config)
    for row in rows:
        assert seed[row.name] in (row.upstream, *(["set"] if row.upstream == "True" else [])), row
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
