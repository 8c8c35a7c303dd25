"""Errors in OpenAI's form."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from vllm.entrypoints.openai.request_log import note
from vllm.v1.engine.async_llm import QueueFullError
from vllm.v1.engine.non_finite import NonFiniteLogitsError

MAX_PROBLEMS = 5
MAX_MESSAGE = 2000


class ApiError(Exception):
    """An error that is the response to a request."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> str:
        """Return the JSON of the response, or of a stream's last event, in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        message = str(self)
        message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
        message = message.encode(errors="replace").decode()  # the quoted text may not be valid Unicode
        info = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": info}, ensure_ascii=False, separators=(",", ":"))

    def response(self) -> Response:
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status in (408, 413):  # the rest of the body is not waited for
            headers["Connection"] = "close"
        return Response(self.body(), self.status, headers, media_type="application/json")


def respond(error: ApiError, scope: Scope) -> Response:
    """The response, with its message in the line of the log as well."""
    note(scope, str(error))
    return error.response()


def to_api_error(error: Exception) -> ApiError:
    """Map an engine's exception to a response: a client's mistake is 400, a full queue 429, the engine's state 503, a
    model that computes NaN 500.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, NonFiniteLogitsError):
        return ApiError(500, str(error), code="non_finite_logits")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    if isinstance(error, RuntimeError):  # asleep, paused or dead
        return ApiError(503, str(error), code="engine_unavailable")
    return ApiError(500, f"{type(error).__name__}: {error}")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error of `app`, the framework's own included, OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return respond(error, request.scope)
        if isinstance(error, HTTPException):
            where = f"{request.method} {request.url.path[:200]}"
            return respond(ApiError(error.status_code, f"{where}: {error.detail}"), request.scope)
        if not isinstance(error, RequestValidationError):
            return respond(ApiError(500, f"{type(error).__name__}: {error}"), request.scope)
        problems = error.errors()
        texts = [_problem(problem["loc"], problem["msg"]) for problem in problems[:MAX_PROBLEMS]]
        if len(problems) > MAX_PROBLEMS:
            texts.append(f"and {len(problems) - MAX_PROBLEMS} more")
        names = [part for part in _fields(problems[0]["loc"]) if isinstance(part, str)] if problems else []
        return respond(ApiError(400, "; ".join(texts), param=names[0] if names else None), request.scope)

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _problem(where: tuple[int | str, ...], text: str) -> str:
    path = ".".join(map(str, _fields(where)))
    text = text.removeprefix("Value error, ")
    return f"{path}: {text}" if path else text


def _fields(where: tuple[int | str, ...]) -> list[int | str]:
    """The place in the body, without the tag of a kind of body."""
    return [part for part in where[1:] if not str(part).startswith("<")]
