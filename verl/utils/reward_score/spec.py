"""Which reward function grades which data source, as plain data that the config can hold."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RewardFunctionSpec:
    """A function by file; ``kwargs`` are JSON and go to every call."""

    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)


# The function that grades when the config names none.
DEFAULT_FUNCTION = RewardFunctionSpec(str(Path(__file__).with_name("default.py")), "default_compute_score")


def function_of(
    data_source: str, by_source: Mapping[str, RewardFunctionSpec], default: RewardFunctionSpec | None
) -> RewardFunctionSpec:
    """The function of a source: its own, else the one of the first pattern that matches, else the default."""
    if data_source in by_source:
        return by_source[data_source]
    for pattern, function in by_source.items():
        if fnmatch.fnmatchcase(data_source, pattern):
            return function
    return default or DEFAULT_FUNCTION
