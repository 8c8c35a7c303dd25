"""Ranges in a profile (upstream: ``verl.utils.profiler.performance``)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import record_function

Function = TypeVar("Function", bound=Callable[..., Any])


def mark_annotate(
    message: str | None = None, color: str | None = None, domain: str | None = None, category: str | None = None
) -> Callable[[Function], Function]:
    """Decorator that makes each call a range called ``message``, or as the function is."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def annotated(*args: Any, **kwargs: Any) -> Any:
            with record_function(message or function.__name__):
                return function(*args, **kwargs)

        return annotated  # type: ignore[return-value]

    return decorate
