"""The server's command line: every field of EngineArgs, and the server's own, each as --its-name."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from vllm.engine.arg_utils import EngineArgs, option


@dataclass(frozen=True)
class ServerArgs:
    """The arguments of the server itself."""

    host: str = option("127.0.0.1", "address to listen on; others than this machine reach it only when you change this")
    port: int = option(8000, "port to listen on; 0 takes a free one and logs it")
    served_model_name: str | None = option(None, "the model's name in requests and responses; default: --model")
    chat_template: str | None = option(None, "file of a Jinja chat template, instead of the tokenizer's own")
    api_key: str | None = option(None, "clients must send it as a bearer token; default: no key is needed")
    max_queue_size: int = option(1024, "unfinished samples at once, running and waiting; more are answered 429")
    max_connections: int = option(1024, "open connections at once; more are answered 503")
    max_body_bytes: int = option(4 * 2**20, "larger request bodies are answered 413")
    max_logprobs: int = option(20, "most log-probs of a position that a request may ask for")
    request_timeout: float = option(30.0, "seconds to send a request's head, to send its body, and to read a response")
    shutdown_timeout: float = option(5.0, "seconds that running requests get to finish after SIGTERM or SIGINT")
    log_level: str = option("info", "debug, info, warning or error")

    def problems(self) -> list[str]:
        """Every problem, empty when the server can start."""
        problems = []
        if not 0 <= self.port < 2**16:
            problems.append(f"port={self.port} must be from 0 to 65535")
        for name in ("max_queue_size", "max_connections", "max_body_bytes", "request_timeout"):
            if getattr(self, name) <= 0:
                problems.append(f"{name}={getattr(self, name)} must be positive")
        for name in ("max_logprobs", "shutdown_timeout"):
            if getattr(self, name) < 0:
                problems.append(f"{name}={getattr(self, name)} must not be negative")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            problems.append(f"chat_template={self.chat_template!r} is not a file")
        if self.log_level not in ("debug", "info", "warning", "error"):
            problems.append(f"log_level={self.log_level!r} is unknown, expected debug, info, warning or error")
        return problems


def parse_args(argv: Sequence[str] | None = None) -> tuple[ServerArgs, EngineArgs]:
    """Parse the command line; exits with a message that lists every problem of the server's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm.entrypoints.openai.api_server",
        description="Serves a checkpoint under OpenAI's HTTP interface.",
    )
    _add_fields(parser.add_argument_group("server"), ServerArgs)
    _add_fields(parser.add_argument_group("engine (EngineArgs)"), EngineArgs)
    given = vars(parser.parse_args(argv))
    server = ServerArgs(**{one.name: given[one.name] for one in dataclasses.fields(ServerArgs)})
    engine = EngineArgs(**{one.name: given[one.name] for one in dataclasses.fields(EngineArgs)})
    problems = server.problems()
    if engine.skip_tokenizer_init:
        problems.append("skip_tokenizer_init: the server needs the tokenizer")
    if problems:
        parser.error("; ".join(problems))
    return server, engine


def _add_fields(group: argparse._ArgumentGroup, owner: type[ServerArgs] | type[EngineArgs]) -> None:
    hints = get_type_hints(owner)
    for one in dataclasses.fields(owner):
        is_required = one.default is MISSING
        options: dict[str, Any] = {"required": True} if is_required else {"default": one.default}
        text = one.metadata.get("help", "")
        options["help"] = text if is_required or one.default is None else f"{text} (default: %(default)s)"
        group.add_argument("--" + one.name.replace("_", "-"), **options, **_form(hints[one.name]))


def _form(hint: Any) -> dict[str, Any]:
    """Return the argparse options for a value of this type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is not None:  # a sequence
        return {"nargs": "+", "type": get_args(hint)[0]}
    return {"type": hint}
