"""Whether every row of a run's data can be graded: each reward function is loaded and its signature checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.config import PPOTrainerConfig
from verl.trainer.config.data import file_list
from verl.utils.parquet import data_sources, schema_problems
from verl.utils.reward_score import code_answers
from verl.utils.reward_score.default import CODE_SOURCES, has_default
from verl.utils.reward_score.functions import load_reward_function
from verl.utils.reward_score.sandbox import missing_protection
from verl.utils.reward_score.spec import DEFAULT_FUNCTION, RewardFunctionSpec, function_of


def reward_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every reason why answers could not be graded, one sentence each; runs the files of the reward functions."""
    custom, where = config.custom_reward_function, "custom_reward_function"
    is_batched = config.reward_model.reward_manager == "batch"
    if custom.default is not None:
        yield from _function_problems(where, custom.default, is_batched)
    for source, function in custom.sources.items():
        yield from _function_problems(f"{where}.by_data_source.{source}", function, is_batched)
    yield from _source_problems(config)


def _function_problems(where: str, spec: RewardFunctionSpec, must_be_batched: bool) -> Iterator[str]:
    try:
        function = load_reward_function(spec)
    except Exception as error:  # a process edge: the user's file runs here, and may raise anything
        yield f"{where}: {type(error).__name__}: {error}"
        return
    if must_be_batched and not function.is_batched:
        yield (
            f"{where}: reward_model.reward_manager is 'batch', but {spec.name} of {spec.path} takes one sample; its "
            "first parameter must be data_sources, or set reward_manager=naive"
        )


def _source_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Yield the mismatches of data and config: rows without a function, functions without a row."""
    files = [*file_list(config.data.train_files), *file_list(config.data.val_files)]
    if any(schema_problems(file, config.data.prompt_key) for file in files):
        return  # reported as problems of the data
    custom, sources = config.custom_reward_function, sorted(data_sources(files))
    for pattern in custom.by_data_source:
        if pattern not in sources and not any(fnmatch.fnmatchcase(source, pattern) for source in sources):
            where = f"custom_reward_function.by_data_source.{pattern}"
            yield f"{where} matches no data source; the data has {_listed(sources)}"
    chosen = {source: function_of(source, custom.sources, custom.default) for source in sources}
    without = [source for source in sources if chosen[source] == DEFAULT_FUNCTION and not has_default(source)]
    if without:
        yield (
            f"no reward function for the data source {_listed(without)}: custom_reward_function.path is empty; give "
            "the Python file of a reward function there or in custom_reward_function.by_data_source (without one: "
            f"{', '.join(CODE_SOURCES)})"
        )
    if any(_runs_programs(chosen[source]) for source in sources if source not in without):
        missing = missing_protection()
        if missing:
            yield missing


def _runs_programs(spec: RewardFunctionSpec) -> bool:
    """Whether one of our own functions runs programs; a user's function is not known to."""
    return spec == DEFAULT_FUNCTION or Path(spec.path) == Path(code_answers.__file__)


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
