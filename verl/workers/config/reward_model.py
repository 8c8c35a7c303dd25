"""Config of reward scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.utils.import_utils import absolute_file
from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.workers.config.keys import NOT_NEGATIVE, Idle, Key, Section, above, at_least, beside, between, key, one_of

_OVERLONG, _LIMIT = "overlong_buffer_cfg", "max_resp_len"
# Managers whose work the scoring processes do.
POOLED = ("naive", "batch", "prime", "dapo", "gdpo")
_SOURCE_KEYS = ("path", "name", "reward_kwargs")
_NOT_POOLED = Idle("the reward manager scores in a process of its own", lambda run, own: not run.reward_model.is_pooled)
_POOLED = Idle("the reward manager is a built-in one", lambda run, own: own.is_pooled)
_NO_PENALTY = Idle(
    "the overlong buffer is not enabled",
    lambda run, own: (
        getattr(own, "is_pooled", True)  # the keyword arguments of a user's manager are its own
        and not (any(run.reward_model.contradictions("")) or run.reward_model.overlong.enable)
    ),
)
_NO_FUNCTION = beside("path", None)
_REGISTERED = beside("manager_source", "register")


def _names(older: str, newer: str) -> dict[str, str]:
    """Upstream's two names of a key about the class of the manager."""
    return {"0.7.0": f"reward_loop_{older}", "0.9.0": f"../reward.reward_manager.{newer}"}


@dataclass(frozen=True)
class OverlongBufferConfig(Section):
    """DAPO's soft overlong punishment, in training: the last ``len`` tokens that a response may have cost reward."""

    enable: bool = False  #: penalise long responses.
    #: tokens at the end of ``data.max_response_length`` over which the penalty grows from 0.
    len: int = key(0, _NO_PENALTY)
    penalty_factor: float = key(1.0, NOT_NEGATIVE, _NO_PENALTY)  #: penalty of a response of the full length.
    log: bool = key(False, _NO_PENALTY)  #: log the penalty and the share of penalised responses as metrics.


_KWARGS = dict.fromkeys(
    (_LIMIT, *(f"{_OVERLONG}.{name}" for name in ("len", "penalty_factor", "log"))), Key((_NO_PENALTY,))
)


@dataclass(frozen=True)
class RewardModelConfig(Section):
    """The pool of scoring processes, and the ledger of their results."""

    #: name of the reward manager. ``naive`` scores in processes; ``prime``, ``dapo`` and ``batch`` are upstream's names
    #: for it, and ``batch`` requires batched functions. A name that a module of
    #: ``actor_rollout_ref.model.external_lib`` registers scores in a process of its own.
    reward_manager: str = "naive"
    #: ``importlib`` takes the class of the manager from ``manager_path``; ``register`` looks its name up.
    manager_source: str = key("register", one_of("register", "importlib"), names=_names("source", "source"))
    #: Python file of the class, or ``pkg://package.module``.
    manager_path: str | None = key(None, _REGISTERED, is_path=True, names=_names("module_path", "module.path"))
    #: name of the class there; absent means ``reward_manager``.
    manager_class: str | None = key(None, _REGISTERED, names={"0.7.0": "reward_loop_class_name"})
    num_workers: int = key(2, at_least(1), _NOT_POOLED)  #: scoring processes.
    #: wall-clock seconds of one call of a reward function; a batched function has them for its whole batch.
    timeout_s: float = key(10.0, above(0), _NOT_POOLED)
    batch_size: int = key(64, at_least(1), _NOT_POOLED)  #: the most samples in one call of a batched function.
    #: the most samples of an ``async def`` function, or of a manager's ``run_single``, that one process scores at the
    #: same time.
    max_concurrent: int = key(16, at_least(1))
    #: MiB of address space of each scoring process, in which a reward function's own model must fit; 0 sets no limit.
    memory_limit_mb: int = key(16384, NOT_NEGATIVE, _NOT_POOLED)
    #: the run stops when more than this share of a step's or a validation's samples cannot be graded, and always when
    #: none of them can.
    max_ungraded_ratio: float = key(0.5, between(0, 1))
    #: ``texts`` writes a line per sample with prompt and response, ``references`` writes their digests instead, ``off``
    #: writes none.
    ledger: str = key("texts", one_of("texts", "references", "off"))
    #: ``overlong_buffer_cfg``, upstream's other place of ``overlong_buffer`` with the same keys, and ``max_resp_len``,
    #: which must be ``data.max_response_length``; or the keyword arguments of a manager that you registered.
    reward_kwargs: dict[str, Any] = key(dict, takes_names=True, members=_KWARGS)
    manager_timeout_s: float = key(1800.0, above(0), _POOLED)  #: wall-clock seconds of such a manager for one batch.
    overlong_buffer: OverlongBufferConfig = key(OverlongBufferConfig)

    @property
    def is_pooled(self) -> bool:
        """Whether the scoring processes do the work of the manager, which is then one of upstream's."""
        return self.manager_source == "register" and self.reward_manager in POOLED

    @property
    def manager_spec(self) -> RewardFunctionSpec | None:
        """File and name of the manager's class, whose arguments the spec leaves out; None for a registered one."""
        if self.manager_source == "register":
            return None
        return RewardFunctionSpec(absolute_file(self.manager_path or ""), self.manager_class or self.reward_manager)

    @property
    def overlong(self) -> OverlongBufferConfig:
        """The penalty of long responses, wherever it was given; call ``problems`` first."""
        given = self.reward_kwargs.get(_OVERLONG) if self.is_pooled else None
        return self.overlong_buffer if given is None else OverlongBufferConfig(**given)

    def contradictions(self, where: str) -> Iterator[str]:
        if self.manager_source == "importlib" and self.manager_path is None:
            yield f"{where}.manager_source is importlib, but manager_path, the file of the class, is not given"
        if not self.is_pooled:
            return  # they are the manager's own
        where = f"{where}.reward_kwargs"
        for name in self.reward_kwargs:
            if name not in (_OVERLONG, _LIMIT):
                yield f"{where}.{name} is not known here; known: {_OVERLONG}, {_LIMIT}"
        given = self.reward_kwargs.get(_OVERLONG)
        if given is None:
            return
        kinds = {"enable": bool, "len": int, "penalty_factor": int | float, "log": bool}
        if not isinstance(given, dict) or not given.keys() <= kinds.keys():
            yield f"{where}.{_OVERLONG} is {given!r}; expected a section with {', '.join(kinds)}"
            return
        wrong = [name for name, value in given.items() if not isinstance(value, kinds[name])]
        for name in wrong:
            yield f"{where}.{_OVERLONG}.{name} is {given[name]!r}; expected {kinds[name]}"
        if wrong:
            return
        if self.overlong_buffer.enable and self.overlong_buffer != self.overlong:
            yield f"{where}.{_OVERLONG} and reward_model.overlong_buffer are both given; leave one of them out"
        yield from self.overlong.problems(f"{where}.{_OVERLONG}")


@dataclass(frozen=True)
class CustomRewardFunctionConfig(Section):
    """Reward functions by file."""

    #: file of the function that scores every sample that ``by_data_source`` does not name; absent means
    #: ``verl.utils.reward_score.default_compute_score``.
    path: str | None = key(None, is_path=True)
    name: str = key("compute_score", _NO_FUNCTION)  #: name of the function in that file.
    reward_kwargs: dict[str, Any] = key(dict, _NO_FUNCTION, takes_names=True)  #: keyword arguments of that function.
    #: maps a data source, or a shell pattern, to a section with ``path`` and optionally ``name`` and ``reward_kwargs``.
    #: An exact name wins over patterns, and the first pattern that matches wins over later ones.
    by_data_source: dict[str, Any] = key(dict, takes_names=True)

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

    def contradictions(self, where: str) -> Iterator[str]:
        """Every section that does not name a function, one sentence each."""
        for source, section in self.by_data_source.items():
            yield from _section_problems(f"{where}.by_data_source.{source}", section)


def _spec(path: str, name: str, kwargs: dict[str, Any]) -> RewardFunctionSpec:
    """The function with its absolute path, by which the ledger names it."""
    return RewardFunctionSpec(absolute_file(path), name, dict(kwargs))


def _section_problems(where: str, section: Any) -> Iterator[str]:
    if not isinstance(section, dict) or not isinstance(section.get("path"), str):
        yield f"{where} is {section!r}; expected a section with path, the Python file of a reward function"
        return
    for name in section:
        if name not in _SOURCE_KEYS:
            yield f"{where} has the unknown key {name!r}; it takes {', '.join(_SOURCE_KEYS)}"
    if not isinstance(section.get("name", ""), str):
        yield f"{where}.name is {section['name']!r}; expected the name of a function"
    if not isinstance(section.get("reward_kwargs") or {}, dict):
        yield f"{where}.reward_kwargs is {section['reward_kwargs']!r}; expected keyword arguments"
