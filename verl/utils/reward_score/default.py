"""The reward function of a data source for which the config names none."""

from __future__ import annotations

import fnmatch
from typing import Any

# Sources whose answers are Python programs, under the names that verl knows them by, and any other that says so.
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco", "code", "code/*")


def has_default(data_source: str) -> bool:
    """Whether ``default_compute_score`` grades this source."""
    return any(fnmatch.fnmatchcase(data_source, pattern) for pattern in CODE_SOURCES)


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """Runs code answers against their tests (``code_answers``); any other source lacks a function: a ValueError."""
    if not has_default(data_source):
        raise ValueError(
            f"data source {data_source!r} has no reward function of its own; name one in custom_reward_function.path "
            f"or custom_reward_function.by_data_source (without one: {', '.join(CODE_SOURCES)})"
        )
    from verl.utils.reward_score.code_answers import compute_score  # starts nothing until a program is run

    return compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
