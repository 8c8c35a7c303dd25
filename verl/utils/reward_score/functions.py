"""Reward functions of users: which grades which data source, loading, checking and calling them, their digests.

Importing this is cheap: the config holds the specs.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.import_utils import load_extern_type

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_FORMS = f"def NAME({', '.join(SINGLE)}) or, for a batched one, def NAME({', '.join(BATCHED)})"


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


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function.

    Attributes:
        is_batched: takes lists (its first parameter is ``data_sources``) and returns one result each.
        is_async: an ``async def``.
        is_by_name: its parameters have the names of SINGLE or BATCHED; otherwise it is called by position.
        version: first 16 digits of the SHA-256 of its file, as it was when loaded; what it imports is not in it.
    """

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    is_batched: bool
    is_async: bool
    is_by_name: bool
    version: str

    def call(self, samples: Sequence[Sequence[Any]]) -> Any:
        """Call the function once for ``samples``, each with the values of SINGLE; exactly one unless it is batched.

        Returns its result, which is a coroutine if it is async.
        """
        values: list[Any] = [list(column) for column in zip(*samples, strict=True)]
        if not self.is_batched:
            [values] = [list(sample) for sample in samples]
        if not self.is_by_name:
            return self.function(*values, **self.kwargs)
        names = BATCHED if self.is_batched else SINGLE
        return self.function(**dict(zip(names, values, strict=True)), **self.kwargs)


def load_reward_function(spec: RewardFunctionSpec) -> RewardFunction:
    """Loads its file; ValueError when it cannot be called as a reward function. The file may raise anything."""
    path = Path(spec.path).expanduser()
    version = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
    function = load_extern_type(spec.path, spec.name)
    where = f"{spec.name} of {spec.path}"
    if not callable(function):
        raise ValueError(f"{where} is a {type(function).__name__}; expected a function")
    signature = inspect.signature(function)
    if problem := signature_problem(spec, signature):
        raise ValueError(problem)
    is_batched = _is_batched(signature)
    is_by_name = _binds_by_name(signature, spec)
    is_async = inspect.iscoroutinefunction(function)
    return RewardFunction(function, spec.kwargs, is_batched, is_async, is_by_name, version)


def signature_problem(spec: RewardFunctionSpec, signature: inspect.Signature) -> str | None:
    """Why a function with this signature cannot be called for a sample, or for a batch; None when it can."""
    expected = BATCHED if _is_batched(signature) else SINGLE
    if _binds_by_name(signature, spec) or _binds(signature, expected, spec.kwargs):
        return None
    given = f" with the reward_kwargs {', '.join(spec.kwargs)}" if spec.kwargs else ""
    where = f"{spec.name} of {spec.path}"
    return f"{where}{signature} cannot be called{given}; expected {_FORMS}, and a parameter for each kwarg"


def _is_batched(signature: inspect.Signature) -> bool:
    return next(iter(signature.parameters), "") == BATCHED[0]


def _binds_by_name(signature: inspect.Signature, spec: RewardFunctionSpec) -> bool:
    names = BATCHED if _is_batched(signature) else SINGLE
    return _binds(signature, (), {**dict.fromkeys(names), **spec.kwargs})


async def gather(function: RewardFunction, samples: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
    """All samples at once through an async function; in order, the result of each or its exception."""
    calls = (asyncio.wait_for(function.call([sample]), timeout_s) for sample in samples)
    return await asyncio.gather(*calls, return_exceptions=True)


def _binds(signature: inspect.Signature, values: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*values, **kwargs)
    except TypeError:
        return False
    return True
