"""A recipe's table of its upstream's parameters: what it says, and whether the resolved config says the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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


def table_after(readme: str, heading: str) -> list[Row]:
    """Rows of the first table of five columns after ``heading``."""
    lines = re.search(r"(?:^\|.*\n)+", readme[readme.index(heading) :], re.MULTILINE)
    assert lines is not None
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()[2:]]
    assert all(len(row) == 5 for row in cells), [row for row in cells if len(row) != 5]
    return [Row(*(cell.strip("`") for cell in row)) for row in cells]


def check_table(rows: list[Row], seed: Mapping[str, str], config_of: Callable[..., PPOTrainerConfig]) -> None:
    """Every parameter of the seed once with its value; every key with its resolved value; every difference named."""
    assert [row.name for row in rows] == list(seed), "the table has the seed's parameters, in its order"
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
    """YAML, with ``1e-6`` as the number that it is elsewhere; ``~/`` is the home directory."""
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(os.path.expanduser(text) if text.startswith("~/") else text)
