"""Small tools without torch: time limits, dicts, enumerations that users extend (``verl.utils.py_functional``)."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

from omegaconf import DictConfig, ListConfig

from verl.protocol_storage import union_dict
from verl.utils.dynamic_enum import DynamicEnum, DynamicEnumMeta

__all__ = [
    "DynamicEnum",
    "DynamicEnumMeta",
    "NestedNamespace",
    "append_to_dict",
    "convert_to_regular_types",
    "temp_env_var",
    "timeout_limit",
    "union_two_dict",
]

_END_GRACE_S = 5.0


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: TimeoutError when the function takes longer than ``seconds``.

    With ``use_signals`` it is interrupted by SIGALRM in this thread, which must be the main one. Otherwise it runs in a
    forked process that is killed; its result and its exceptions come back pickled.
    """
    limited = _limited_by_signal if use_signals else _limited_by_process

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return limited(functools.partial(function, *args, **kwargs), function.__name__, seconds)

        return call

    return decorate


def _limited_by_signal(call: Callable[[], Any], name: str, seconds: float) -> Any:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{name} timed out after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _limited_by_process(call: Callable[[], Any], name: str, seconds: float) -> Any:
    context = multiprocessing.get_context("fork")  # a function of any scope runs there, unpickled
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(call, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise TimeoutError(f"{name} timed out after {seconds} seconds")
        try:
            is_result, value = receiver.recv()
        except EOFError as error:
            raise RuntimeError(f"the process of {name} ended without a result") from error
    finally:
        process.kill()
        process.join(_END_GRACE_S)
        receiver.close()
    if is_result:
        return value
    raise value


def _send_result(call: Callable[[], Any], sender: Any) -> None:
    try:
        sender.send((True, call()))
    except Exception as error:
        sender.send((False, error))


def union_two_dict(dict1: dict, dict2: dict) -> dict:
    """Adds the entries of the second to the first, in place; a key of both with different values is an error."""
    dict1.update(union_dict(dict1, dict2, "the second dict"))
    return dict1


def append_to_dict(data: dict, new_data: dict, prefix: str = "") -> None:
    """Appends each value to the list under its key, which gets ``prefix`` unless it begins with it."""
    for key, value in new_data.items():
        data.setdefault(key if key.startswith(prefix) else f"{prefix}{key}", []).append(value)


class NestedNamespace(SimpleNamespace):
    """A dict as attributes, at every depth."""

    def __init__(self, dictionary: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            setattr(self, key, NestedNamespace(value) if isinstance(value, dict) else value)


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside, and what it was before afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def convert_to_regular_types(obj: Any) -> Any:
    """``obj`` with Hydra's dicts and lists as Python's, at every depth."""
    if isinstance(obj, ListConfig | list | tuple):
        values = [convert_to_regular_types(value) for value in obj]
        return tuple(values) if isinstance(obj, tuple) else values
    if isinstance(obj, DictConfig | dict):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    return obj
