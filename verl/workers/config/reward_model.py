"""Config of reward scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.workers.config.values import NOT_NEGATIVE, Section, above, at_least, between, one_of

_OVERLONG, _LIMIT = "overlong_buffer_cfg", "max_resp_len"
# Managers whose work the scoring processes do.
POOLED = ("naive", "batch", "prime", "dapo")
_SOURCE_KEYS = ("path", "name", "reward_kwargs")


@dataclass(frozen=True)
class OverlongBufferConfig(Section):
    """DAPO's soft overlong punishment, in training: the last ``len`` tokens that a response may have cost reward.

    Attributes:
        enable: penalise long responses.
        len: tokens at the end of ``data.max_response_length`` over which the penalty grows from 0.
        penalty_factor: penalty of a response of the full length.
        log: log the penalty and the share of penalised responses as metrics.
    """

    VALUES: ClassVar = {"penalty_factor": NOT_NEGATIVE}

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False


@dataclass(frozen=True)
class RewardModelConfig(Section):
    """The pool of scoring processes, and the ledger of their results.

    Attributes:
        reward_manager: name of the reward manager. ``naive`` scores in processes; ``prime``, ``dapo`` and ``batch`` are
            upstream's names for it, and ``batch`` requires batched functions. A name that a module of
            ``actor_rollout_ref.model.external_lib`` registers scores whole batches in a process of its own.
        reward_kwargs: ``overlong_buffer_cfg``, upstream's other place of ``overlong_buffer`` with the same keys, and
            ``max_resp_len``, which must be ``data.max_response_length``; or the keyword arguments of a manager that
            you registered.
        manager_timeout_s: wall-clock seconds of such a manager for one batch.
        num_workers: scoring processes.
        timeout_s: wall-clock seconds of one call of a reward function; a batched function has them for its whole batch.
        batch_size: the most samples in one call of a batched function.
        max_concurrent: the most samples of an ``async def`` function that one process scores at the same time.
        memory_limit_mb: MiB of address space of each scoring process, in which a reward function's own model must fit;
            0 sets no limit.
        max_ungraded_ratio: the run stops when more than this share of a step's or a validation's samples cannot be
            graded, and always when none of them can.
        ledger: ``texts`` writes a line per sample with prompt and response, ``references`` writes their digests
            instead, ``off`` writes none.
    """

    VALUES: ClassVar = {
        **dict.fromkeys(("num_workers", "batch_size", "max_concurrent"), at_least(1)),
        **dict.fromkeys(("timeout_s", "manager_timeout_s"), above(0)),
        "memory_limit_mb": NOT_NEGATIVE,
        "max_ungraded_ratio": between(0, 1),
        "ledger": one_of("texts", "references", "off"),
    }

    reward_manager: str = "naive"
    num_workers: int = 2
    timeout_s: float = 10.0
    batch_size: int = 64
    max_concurrent: int = 16
    memory_limit_mb: int = 16384
    max_ungraded_ratio: float = 0.5
    ledger: str = "texts"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    manager_timeout_s: float = 1800.0
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    @property
    def is_pooled(self) -> bool:
        """Whether the scoring processes do the work of the manager, which is then one of upstream's."""
        return self.reward_manager in POOLED

    @property
    def overlong(self) -> OverlongBufferConfig:
        """The penalty of long responses, wherever it was given; call ``problems`` first."""
        given = self.reward_kwargs.get(_OVERLONG) if self.is_pooled else None
        return self.overlong_buffer if given is None else OverlongBufferConfig(**given)

    def contradictions(self, where: str) -> list[str]:
        if not self.is_pooled:
            return []  # they are the manager's own
        where = f"{where}.reward_kwargs"
        found = [
            f"{where}.{key} is not known here; known: {_OVERLONG}, {_LIMIT}"
            for key in self.reward_kwargs
            if key not in (_OVERLONG, _LIMIT)
        ]
        given = self.reward_kwargs.get(_OVERLONG)
        if given is None:
            return found
        kinds = {"enable": bool, "len": int, "penalty_factor": int | float, "log": bool}
        if not isinstance(given, dict) or not given.keys() <= kinds.keys():
            return [*found, f"{where}.{_OVERLONG} is {given!r}; expected a section with {', '.join(kinds)}"]
        wrong = [key for key, value in given.items() if not isinstance(value, kinds[key])]
        found += [f"{where}.{_OVERLONG}.{key} is {given[key]!r}; expected {kinds[key]}" for key in wrong]
        if not wrong and self.overlong_buffer.enable and self.overlong_buffer != self.overlong:
            found.append(f"{where}.{_OVERLONG} and reward_model.overlong_buffer are both given; leave one of them out")
        return found if wrong else found + self.overlong.problems(f"{where}.{_OVERLONG}")


@dataclass(frozen=True)
class CustomRewardFunctionConfig(Section):
    """Reward functions by file.

    Attributes:
        path: file of the function that scores every sample that ``by_data_source`` does not name; absent means
            ``verl.utils.reward_score.default_compute_score``.
        name: name of the function in that file.
        reward_kwargs: keyword arguments of that function.
        by_data_source: maps a data source, or a shell pattern, to a section with ``path`` and optionally ``name`` and
            ``reward_kwargs``. An exact name wins over patterns, and the first pattern that matches wins over later
            ones.
    """

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    by_data_source: dict[str, Any] = field(default_factory=dict)

    @property
    def default(self) -> RewardFunctionSpec | None:
        """The function of sources that ``by_data_source`` does not name; None means the built-in one."""
        return None if self.path is None else _spec(self.path, self.name, self.reward_kwargs)

    @property
    def sources(self) -> dict[str, RewardFunctionSpec]:
        """The functions of ``by_data_source``; call ``problems`` first."""
        return {
            source: _spec(section["path"], section.get("name", "compute_score"), section.get("reward_kwargs") or {})
            for source, section in self.by_data_source.items()
        }

    def contradictions(self, where: str) -> list[str]:
        """Every section that does not name a function, one sentence each."""
        return [
            problem
            for source, section in self.by_data_source.items()
            for problem in _section_problems(f"{where}.by_data_source.{source}", section)
        ]


def _spec(path: str, name: str, kwargs: dict[str, Any]) -> RewardFunctionSpec:
    """The function with its absolute path, by which the ledger names it."""
    return RewardFunctionSpec(str(Path(path).expanduser().absolute()), name, dict(kwargs))


def _section_problems(where: str, section: Any) -> Iterator[str]:
    if not isinstance(section, dict) or not isinstance(section.get("path"), str):
        yield f"{where} is {section!r}; expected a section with path, the Python file of a reward function"
        return
    for key in section:
        if key not in _SOURCE_KEYS:
            yield f"{where} has the unknown key {key!r}; it takes {', '.join(_SOURCE_KEYS)}"
    if not isinstance(section.get("name", ""), str):
        yield f"{where}.name is {section['name']!r}; expected the name of a function"
    if not isinstance(section.get("reward_kwargs") or {}, dict):
        yield f"{where}.reward_kwargs is {section['reward_kwargs']!r}; expected keyword arguments"
