"""Config of reward scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.utils.reward_score.spec import RewardFunctionSpec

LEDGER_CONTENTS = ("texts", "references", "off")
_SOURCE_KEYS = ("path", "name", "reward_kwargs")


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's soft overlong punishment, in training: the last ``len`` tokens that a response may have cost reward.

    Attributes:
        enable: penalise long responses.
        len: tokens at the end of ``data.max_response_length`` over which the penalty grows from 0.
        penalty_factor: penalty of a response of the full length.
        log: log the penalty and the share of penalised responses as metrics.
    """

    enable: bool = False
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False

    def problems(self, where: str, max_response_length: int) -> list[str]:
        """Every value that cannot work, one sentence each."""
        if not self.enable:
            return []
        found = []
        if not 1 <= self.len <= max_response_length:
            found.append(
                f"{where}.len is {self.len}; expected 1 to data.max_response_length ({max_response_length}) tokens"
            )
        if self.penalty_factor < 0:
            found.append(f"{where}.penalty_factor is {self.penalty_factor}; it must not be negative, it is subtracted")
        return found


@dataclass(frozen=True)
class RewardModelConfig:
    """The pool of scoring processes, and the ledger of their results.

    Attributes:
        reward_manager: registered name of the reward manager. ``naive`` scores in processes; ``prime`` and ``batch``
            are upstream's names for it, and ``batch`` requires batched functions.
        num_workers: scoring processes.
        timeout_s: wall-clock seconds of one call of a reward function; a batched function has them for its whole batch.
        batch_size: the most samples in one call of a batched function.
        max_concurrent: the most samples of an ``async def`` function that one process scores at the same time.
        ledger: ``texts`` writes a line per sample with prompt and response, ``references`` writes their digests
            instead, ``off`` writes none.
    """

    reward_manager: str = "naive"
    num_workers: int = 2
    timeout_s: float = 10.0
    batch_size: int = 64
    max_concurrent: int = 16
    ledger: str = "texts"
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = [
            f"{where}.{key} is {getattr(self, key)}; it must be at least 1"
            for key in ("num_workers", "batch_size", "max_concurrent")
            if getattr(self, key) < 1
        ]
        if self.timeout_s <= 0:
            found.append(f"{where}.timeout_s is {self.timeout_s}; it must be above 0")
        if self.ledger not in LEDGER_CONTENTS:
            found.append(f"{where}.ledger is {self.ledger!r}; expected {', '.join(LEDGER_CONTENTS)}")
        return found


@dataclass(frozen=True)
class CustomRewardFunctionConfig:
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

    def problems(self, where: str) -> list[str]:
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
