"""The reward function of a data source for which the config names none."""

from __future__ import annotations

import fnmatch
from typing import Any

from verl.utils.errors import UnknownNameError

# Sources whose answers are Python programs, under the names that verl knows them by, and any other that says so.
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco", "code", "code/*")
# Sources of mathematics, by the module that grades them.
GSM8K_SOURCES = ("openai/gsm8k",)
MATH_SOURCES = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning", "aime*")
DEFAULT_SOURCES = (*CODE_SOURCES, *GSM8K_SOURCES, *MATH_SOURCES, *DAPO_SOURCES)


def has_default(data_source: str) -> bool:
    """Whether ``default_compute_score`` grades this source."""
    return _is_in(data_source, DEFAULT_SOURCES)


def runs_programs(data_source: str) -> bool:
    """Whether ``default_compute_score`` runs what this source's answers say."""
    return _is_in(data_source, CODE_SOURCES)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """The score of an answer by the function of its source: a number, or a dict with ``score``.

    Args:
        data_source: chooses ``gsm8k``, ``math_reward``, ``math_dapo`` or, for programs, ``code_answers``.
        solution_str: the answer.
        ground_truth: what the source's rows have as such.
        extra_info: the rest of the row.
        sandbox_fusion_url, concurrent_semaphore: of a remote sandbox, which there is not: None.
        memory_limit_mb: memory of a program.
        kwargs: go to the function of the source.

    Raises:
        ValueError: the source has no function, or a remote sandbox is asked for.
    """
    if sandbox_fusion_url is not None or concurrent_semaphore is not None:
        raise ValueError(
            f"sandbox_fusion_url is {sandbox_fusion_url!r}; programs run in the sandbox of this machine "
            "(verl.utils.reward_score.sandbox), leave it and concurrent_semaphore out"
        )
    if runs_programs(data_source):
        from verl.utils.reward_score import code_answers  # starts nothing until a program is run

        limits: dict[str, Any] = {} if memory_limit_mb is None else {"memory_mb": memory_limit_mb}
        return code_answers.compute_score(data_source, solution_str, ground_truth, extra_info, **limits, **kwargs)
    ground_truth = str(ground_truth)  # a data set may have an answer as a number
    if _is_in(data_source, GSM8K_SOURCES):
        from verl.utils.reward_score import gsm8k

        return gsm8k.compute_score(solution_str, ground_truth, **kwargs)
    if _is_in(data_source, MATH_SOURCES):
        from verl.utils.reward_score import math_reward

        return math_reward.compute_score(solution_str, ground_truth, **kwargs)
    if _is_in(data_source, DAPO_SOURCES):
        from verl.utils.reward_score import math_dapo

        return math_dapo.compute_score(solution_str, ground_truth, **kwargs)
    raise UnknownNameError(
        f"data source {data_source!r} has no reward function of its own; name one in custom_reward_function.path "
        f"or custom_reward_function.by_data_source (without one: {', '.join(DEFAULT_SOURCES)})"
    )


def _is_in(data_source: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(data_source, pattern) for pattern in patterns)
