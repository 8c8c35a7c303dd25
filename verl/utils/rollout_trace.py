"""Traces of what a user's rollout code calls, in MLflow or Weave (upstream: ``verl.utils.rollout_trace``).

    RolloutTraceConfig.init("project", "experiment", "mlflow")

    class Loop:
        @rollout_trace_op
        async def generate(self, prompt): ...

    with rollout_trace_attr(sample_index=3, step=1, rollout_n=0):
        await Loop().generate("...")

Without ``init`` the decorator calls the function and does nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

__all__ = ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"]

_DEFAULT_STORE = "sqlite:////tmp/mlruns.db"
_ATTRIBUTES: ContextVar[Mapping[str, str]] = ContextVar("attributes of the calls that Weave gets")


class RolloutTraceConfig:
    """Where this process's traces go; one object a process.

    Attributes:
        backend: ``mlflow`` or ``weave``; None where nothing is traced.
        client: the package of MLflow, or the client of Weave.
        token2text: results with ``prompt_ids`` or ``response_ids`` get the texts as well, by ``self.tokenizer``.
        project_name: the experiment in MLflow, the project in Weave.
        experiment_name: a tag of each trace.
    """

    _instance: RolloutTraceConfig | None = None
    backend: str | None = None
    client: Any = None
    token2text: bool = False
    _initialized: bool = False
    project_name: str | None = None
    experiment_name: str | None = None

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None, token2text: bool = False) -> None:
        """Opens the backend; a second call does nothing until ``reset``.

        Raises:
            ValueError: the backend is not there, or its package is not installed.
        """
        config = cls.get_instance()
        if config._initialized:
            return
        client: Any = None
        if backend not in (None, "mlflow", "weave"):
            raise ValueError(f"the trace backend is {backend!r}; expected mlflow, weave or None")
        if backend is not None:
            try:
                client = importlib.import_module(backend)
            except ImportError as error:
                raise ValueError(f"the trace backend {backend} needs its package: pip install {backend}") from error
        if backend == "weave":
            client = client.init(project_name)
        elif backend == "mlflow":
            client.config.enable_async_logging()
            client.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", _DEFAULT_STORE))
            client.set_experiment(project_name)
        config.backend, config.client, config.token2text = backend, client, token2text
        config.project_name, config.experiment_name = project_name, experiment_name
        config._initialized = True

    @classmethod
    def get_backend(cls) -> str | None:
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> Any:
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool | None:
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Back to tracing nothing."""
        cls._instance = None


@contextlib.contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
) -> Iterator[None]:
    """Makes what is inside one trace called ``name``, with the other arguments as its tags."""
    config = RolloutTraceConfig.get_instance()
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    tags = {key: str(value) for key, value in given.items() if value is not None}
    if config.client is None or not tags:
        yield
        return
    tags |= {"validate": str(validate), "experiment_name": str(config.experiment_name)}
    if config.backend == "weave":
        token = _ATTRIBUTES.set(tags)
        try:
            yield
        finally:
            _ATTRIBUTES.reset(token)
        return
    with config.client.start_span(name=name) as span:
        for key, value in tags.items():
            config.client.set_trace_tag(span.trace_id, key, value)
        yield


def rollout_trace_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that makes each call of a method, plain or async, a span with its arguments and its result."""

    @functools.wraps(func)
    async def traced_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _span(func, self, args, kwargs) as finish:
            return finish(await func(self, *args, **kwargs))

    @functools.wraps(func)
    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _span(func, self, args, kwargs) as finish:
            return finish(func(self, *args, **kwargs))

    return traced_async if inspect.iscoroutinefunction(func) else traced


@contextlib.contextmanager
def _span(
    func: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Callable[[Any], Any]]:
    """A span around a call; what is given to the function that it yields becomes the span's output, and comes back."""
    config = RolloutTraceConfig.get_instance()
    if config.client is None:
        yield lambda result: result
        return
    bound = inspect.signature(func).bind(owner, *args, **kwargs)
    bound.apply_defaults()
    inputs = dict(list(bound.arguments.items())[1:])  # without self
    if config.backend == "weave":
        with _weave_call(config, func.__qualname__, inputs, owner) as finish_call:
            yield finish_call
        return
    with config.client.start_span(name=func.__qualname__) as span:
        span.set_inputs(inputs)

        def finish(result: Any) -> Any:
            span.set_outputs(_with_texts(owner, result) if config.token2text else result)
            return result

        yield finish


@contextlib.contextmanager
def _weave_call(
    config: RolloutTraceConfig, name: str, inputs: dict[str, Any], owner: Any
) -> Iterator[Callable[[Any], Any]]:
    call = config.client.create_call(op=name, inputs=inputs, attributes=dict(_ATTRIBUTES.get({})))

    def finish(result: Any) -> Any:
        config.client.finish_call(call, output=_with_texts(owner, result) if config.token2text else result)
        return result

    try:
        yield finish
    except Exception as error:
        config.client.finish_call(call, exception=error)
        raise


def _with_texts(owner: Any, result: Any) -> Any:
    """The fields of ``result`` and, where it has ids, their texts."""
    tokenizer = getattr(owner, "tokenizer", None)
    fields = result if isinstance(result, dict) else getattr(result, "__dict__", None)
    if tokenizer is None or not isinstance(fields, dict):
        return result
    ids = {"prompt_ids": "prompt_text", "response_ids": "response_text"}
    texts = {text: tokenizer.decode(fields[key]) for key, text in ids.items() if fields.get(key) is not None}
    return {**fields, **texts}
