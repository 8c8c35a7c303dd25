"""What a value is on its way through a real run: the classes that carry it, and what functions made of it.

A test names the first and the last function of the way, and asks which classes of ours came into being between them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import CodeType, FrameType
from typing import Any

OURS = ("hf_formats", "megatron", "mindspeed", "mindspeed_llm", "verl", "vllm", "vllm_ascend")
_MOST_ITEMS, _MOST_LEVELS = 64, 3  # of a container that are looked at
_VARARGS, _VARKEYWORDS = 4, 8  # flags of a code object

Function = Callable[..., Any]


class Way:
    """What our functions were given, or returned, between the first call of one and the last return of another.

    Attributes:
        classes: every class of ours of which an instance that was not there before was seen on the way, and the
            function that had it first. ``dict`` and ``tuple`` are among them where one with more than two fields
            carries the value.
    """

    def __init__(
        self,
        first: CodeType,
        last: CodeType,
        carries: Callable[[Any], bool],
        skipped: Collection[CodeType],
        watched: Mapping[CodeType, Callable[[Any], None]],
    ) -> None:
        self.classes: dict[type, str] = {}
        self._first, self._last, self._carries, self._skipped, self._watched = first, last, carries, skipped, watched
        self._seen: dict[type, str] = {}
        self._is_on = False
        self._earlier: dict[int, Any] = {}  # instances of ours from before; they are kept, so that no id is used again
        self._inside: list[FrameType] = []  # calls of skipped functions

    def hook(self, frame: FrameType, event: str, value: Any) -> None:
        """For ``sys.setprofile``."""
        module = str(frame.f_globals.get("__name__"))
        if event not in ("call", "return") or module.partition(".")[0] not in OURS:
            return
        code = frame.f_code
        if not self._is_on and code is self._first:
            self._is_on = True
            self._earlier = {id(one): one for one in gc.get_objects() if _is_ours(type(one))}
        if not self._is_on:
            return
        if event == "return" and self._inside and self._inside[-1] is frame:
            self._inside.pop()
        if not self._inside:
            where = f"{module}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
            self._look(_arguments(frame) if event == "call" else [value], where, _MOST_LEVELS)
        if event == "return" and code in self._watched:
            self._watched[code](value)
        if event == "return" and code is self._last:
            self.classes = dict(self._seen)
        if event == "call" and code in self._skipped:
            self._inside.append(frame)

    def _look(self, values: Collection[Any], where: str, levels: int) -> None:
        for value in values:
            kind = type(value)
            if _is_ours(kind):
                if id(value) not in self._earlier:
                    self._seen.setdefault(kind, where)
            elif kind in (list, tuple, dict) and levels:
                if kind is not list and len(value) > 2 and kind not in self._seen and self._carries(value):
                    self._seen[kind] = where
                inner = list(value.values()) if kind is dict else value
                self._look(inner[:_MOST_ITEMS], where, levels - 1)


@contextmanager
def traced(
    first: Function,
    last: Function,
    carries: Callable[[Any], bool],
    *,
    skipped: Collection[Function] = (),
    watched: Mapping[Function, Callable[[Any], None]] | None = None,
) -> Iterator[Way]:
    """Trace this thread from the first call of ``first`` to the last return of ``last``, both functions of ours.

    Args:
        carries: whether a dict or a tuple has the value in it.
        skipped: functions that are one hop: what they are given and return counts, and not what they do with it.
        watched: functions, each with what is called with every value that it returns.
    """
    watching = {_code(function): look for function, look in (watched or {}).items()}
    way = Way(_code(first), _code(last), carries, {_code(one) for one in skipped}, watching)
    sys.setprofile(way.hook)
    try:
        yield way
    finally:
        sys.setprofile(None)


def _code(function: Any) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code: CodeType = function.__code__
    return code


def _arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & _VARARGS) + bool(code.co_flags & _VARKEYWORDS)
    values = frame.f_locals
    return [values[name] for name in code.co_varnames[:count] if name in values]


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).partition(".")[0] in OURS and not issubclass(kind, (type, Enum, BaseException))
