"""The server's command line: the server's own arguments, every field of EngineArgs, and the rest of vLLM's options."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from vllm.engine.arg_utils import EngineArgs, option
from vllm.engine.client_args import CLIENT_ARGS, ClientArg, take_client_args
from vllm.reasoning import REASONING_PARSERS
from vllm.tool_parsers import TOOL_PARSERS

LOG_LEVELS = ("debug", "info", "warning", "error")
SHORT_FORMS = {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "speculative_config": "-sc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "optimization_level": "-O",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "nnodes": "-n",
    "node_rank": "-r",
}
_LONG_FORMS = {short: "--" + name.replace("_", "-") for name, short in SHORT_FORMS.items()}

_OPTION = re.compile(r"^--[\w-]+")
_OPTION_OF_KEY = re.compile(r"(--?[a-z][\w-]*)\.([\w.-]+)(=.*)?", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)([kmgt]?)", re.IGNORECASE)
_TLS = "the server speaks plain HTTP: put a proxy with TLS before it"
_BROWSERS = "pages of other origins cannot ask the server"
_ADAPTERS = "adapters are not supported"

# What vLLM's server takes and LLM does not.
SERVER_ONLY: dict[str, ClientArg] = {
    "disable_uvicorn_access_log": ClientArg(False, "disable_log_requests leaves out the line of a request", None, bool),
    "enable_log_requests": ClientArg(False, "requests are logged unless disable_log_requests", None, bool),
    "stream_interval": ClientArg(1, "tokens are sent as they come", None, int),
    "max_log_len": ClientArg(None, "prompts are not logged", None, int),
    "enable_reasoning": ClientArg(False, "reasoning_parser alone decides", None, bool),
    "enable_prompt_tokens_details": ClientArg(False, "usage always has them", None, bool),
    "disable_frontend_multiprocessing": ClientArg(False, "there is one process", None, bool),
    "disable_fastapi_docs": ClientArg(False, "there are no such pages", None, bool),
    "response_role": ClientArg("assistant", "answers come from the assistant"),
    "chat_template_content_format": ClientArg("auto", "templates get contents as text", ("string",)),
    "weight_transfer_config": ClientArg(None, "the server takes no weights; an LLM of another process does (ipc)"),
    "api_server_count": ClientArg(1, "there is one process", kind=int),
    "uds": ClientArg(None, "the server listens on host and port"),
    "ssl_keyfile": ClientArg(None, _TLS),
    "ssl_certfile": ClientArg(None, _TLS),
    "ssl_ca_certs": ClientArg(None, _TLS),
    "root_path": ClientArg(None, "paths have no prefix"),
    "middleware": ClientArg(None, "code of users does not run in the server"),
    "allow_credentials": ClientArg(False, _BROWSERS, kind=bool),
    "allowed_origins": ClientArg(None, _BROWSERS),
    "allowed_methods": ClientArg(None, _BROWSERS),
    "allowed_headers": ClientArg(None, _BROWSERS),
    "lora_modules": ClientArg(None, _ADAPTERS),
    "prompt_adapters": ClientArg(None, _ADAPTERS),
    "tool_parser_plugin": ClientArg(None, "code of users does not run in the server"),
    "return_tokens_as_token_ids": ClientArg(False, "log-probs name tokens by their text", kind=bool),
    "enable_request_id_headers": ClientArg(False, "ids are in the bodies of responses", kind=bool),
    "enable_server_load_tracking": ClientArg(False, "there is no /load; /metrics has the numbers", kind=bool),
}


@dataclass(frozen=True)
class ServerArgs:
    """The arguments of the server itself."""

    host: str = option("127.0.0.1", "address to listen on; others than this machine reach it only when you change this")
    port: int = option(8000, "port to listen on; 0 takes a free one and logs it")
    served_model_name: Sequence[str] | None = option(
        None, "the model's names in requests, the first also in responses; default: MODEL"
    )
    chat_template: str | None = option(
        None, "Jinja chat template, a file or in braces the text itself, instead of the tokenizer's own"
    )
    trust_request_chat_template: bool = option(False, "take chat templates from requests; one can keep the server busy")
    reasoning_parser: str | None = option(
        None, f"return the thought as reasoning_content: {', '.join(REASONING_PARSERS)}"
    )
    enable_auto_tool_choice: bool = option(False, "take tools in requests, and return what the model calls")
    tool_call_parser: str | None = option(None, f"form of the calls that the model writes: {', '.join(TOOL_PARSERS)}")
    generation_config: str = option(
        "auto", "where defaults of sampling come from: auto (MODEL/generation_config.json), vllm (none) or a directory"
    )
    override_generation_config: str | None = option(None, "further defaults of sampling, as a JSON object")
    api_key: str | None = option(
        None, "clients must send it as a bearer token; default: VLLM_API_KEY, else none is needed"
    )
    max_queue_size: int = option(1024, "unfinished samples at once, running and waiting; more are answered 429")
    max_connections: int = option(1024, "open connections at once; more are answered 503")
    max_body_bytes: int = option(4 * 2**20, "larger request bodies are answered 413")
    max_logprobs: int = option(20, "most log-probs of a position that a request may ask for")
    request_timeout: float = option(30.0, "seconds to send a request's head, to send its body, and to read a response")
    shutdown_timeout: float = option(5.0, "seconds that running requests get to finish after SIGTERM or SIGINT")
    disable_log_requests: bool = option(False, "do not log a line for each request")
    log_level: str = option("info", "debug, info, warning or error; with debug, problems come with a traceback")
    uvicorn_log_level: str = option("info", "the same for the HTTP server alone, and trace or critical")

    def model_names(self, model: str) -> list[str]:
        """The names of the model, which is in directory `model`."""
        names = self.served_model_name or [model]
        return [names] if isinstance(names, str) else list(names)

    def template(self) -> str | None:
        """The text of the chat template; OSError for a file that cannot be read."""
        given = self.chat_template
        return given if given is None or "{" in given else Path(given).read_text(encoding="utf-8-sig")

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
        if self.chat_template is not None and "{" not in self.chat_template and not Path(self.chat_template).is_file():
            problems.append(f"chat_template={self.chat_template!r} is not a file")
        choices = {
            "log_level": LOG_LEVELS,
            "uvicorn_log_level": ("trace", *LOG_LEVELS, "critical"),
            "reasoning_parser": (None, *REASONING_PARSERS),
            "tool_call_parser": (None, *TOOL_PARSERS),
        }
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            problems.append(f"enable_auto_tool_choice needs tool_call_parser, one of {', '.join(TOOL_PARSERS)}")
        for name, known in choices.items():
            if getattr(self, name) not in known:
                expected = ", ".join(one for one in known if one is not None)
                problems.append(f"{name}={getattr(self, name)!r} is unknown, expected one of: {expected}")
        return problems


def parse_args(
    argv: Sequence[str] | None = None, prog: str = "python -m vllm.entrypoints.openai.api_server"
) -> tuple[ServerArgs, EngineArgs, list[str]]:
    """Parse the command line; the last item is a note on each option that has no effect.

    Exits with status 2 and a message that lists every problem of the arguments.
    """
    parser = _Parser(
        prog=prog,
        usage=f"{prog} MODEL [option ...]",
        description="Serves the model in directory MODEL under OpenAI's HTTP interface.",
        allow_abbrev=False,
    )
    server_group = parser.add_argument_group("server")
    server_group.add_argument("--config", metavar="FILE", help="YAML file of options, of which those given here count")
    _add_fields(server_group, ServerArgs)
    _add_fields(parser.add_argument_group("engine (EngineArgs)"), EngineArgs)
    others = {name: known for name, known in {**CLIENT_ARGS, **SERVER_ONLY}.items() if name not in _fields(ServerArgs)}
    _add_client_args(parser.add_argument_group("options of vLLM that change nothing here, or are refused"), others)
    words = _with_file(list(sys.argv[1:] if argv is None else argv), parser)
    try:
        words = _with_whole_objects([_dashed(word) for word in words])
    except ValueError as error:
        parser.error(str(error))
    parsed, rest = parser.parse_known_args(words)
    given = vars(parsed)
    given["model"], problems = _model(given["model"], rest, parser)
    given["api_key"] = given["api_key"] or os.environ.get("VLLM_API_KEY")
    server = ServerArgs(**{name: given[name] for name in _fields(ServerArgs)})
    engine = EngineArgs(**{name: given[name] for name in _fields(EngineArgs)})
    problems += server.problems()
    problems += _engine_problems(engine)
    notes = [
        f"{name}={given[name]!r}: {one.reason}" for name, one in others.items() if _has_no_effect(given[name], one)
    ]
    problems += take_client_args({name: given[name] for name in others}, others)[2]
    if problems:
        parser.error(problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems))
    return server, engine, notes


def _with_file(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """vLLM's ``--config FILE``: the options of a YAML file that the command line does not give itself."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    found, rest = first.parse_known_args(words)
    if found.config is None:
        return words
    try:
        given = yaml.safe_load(found.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"--config {found.config} cannot be read: {error}")
    if not isinstance(given, dict):
        parser.error(f"--config {found.config}: expected a section of options and their values")
    own = {_dashed(_LONG_FORMS.get(name, name)) for name in (word.partition("=")[0] for word in rest)}
    for name, value in given.items():
        option = _dashed(f"--{name}")
        negated = option.replace("--", "--no-", 1)
        if option in own or negated in own or value is None:
            continue
        if isinstance(value, bool):
            rest.append(option if value else negated)
        elif isinstance(value, list):
            rest += [option, *map(str, value)]
        else:
            rest.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
    return rest


def _dashed(word: str) -> str:
    return _OPTION.sub(lambda name: name[0].replace("_", "-"), word)


def _with_whole_objects(words: Sequence[str]) -> list[str]:
    """vLLM's ``--option.key value`` and ``--option.key=value`` as one ``--option`` with a JSON object; ValueError."""
    kept, objects, left = list[str](), dict[str, dict[str, Any]](), iter(words)
    for word in left:
        found = _OPTION_OF_KEY.fullmatch(word)
        if found is None:
            kept.append(word)
            continue
        name, path, value = found.groups()
        name = _LONG_FORMS.get(name, name)
        text = next(left, None) if value is None else value[1:]
        if text is None or text.startswith("--"):
            raise ValueError(f"{word} needs a value")
        *outer, last = path.replace("-", "_").split(".")
        target = objects.setdefault(name, {})
        for key in outer:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise ValueError(f"{word}: {key} has a value of its own already")
        try:
            target[last] = json.loads(text)
        except ValueError:
            target[last] = text
    names = [word.partition("=")[0] for word in kept]
    if twice := {_LONG_FORMS.get(name, name) for name in names} & objects.keys():
        raise ValueError(f"{', '.join(sorted(twice))}: give the whole object or its keys, not both")
    return kept + [word for name, found in objects.items() for word in (name, json.dumps(found))]


def _model(model: str | None, rest: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, list[str]]:
    """The model, given as --model or alone, and what is wrong with the words that belong to no option."""
    unknown = [word.partition("=")[0] for word in rest if word.startswith("-")]
    problems = []
    for name in unknown:
        close = difflib.get_close_matches(name, parser._option_string_actions, n=1, cutoff=0.75)
        problems.append(f"{name} is not an option" + (f", did you mean {close[0]}?" if close else ""))
    if unknown:  # the other words may be their values
        return model or "", problems
    models = list(dict.fromkeys([*rest, *([] if model is None else [model])]))
    if not models:
        problems.append("there is no MODEL: give its directory")
    elif len(models) > 1:
        problems.append(f"there is more than one MODEL: {', '.join(models)}")
    return "".join(models[:1]), problems


def _engine_problems(engine: EngineArgs) -> list[str]:
    """What the engine can do and the server cannot."""
    problems = ["skip_tokenizer_init: the server needs the tokenizer"] if engine.skip_tokenizer_init else []
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if (size := getattr(engine, name)) not in (None, 1):
            problems.append(f"{name}={size}: the server runs a model in one process, on one device")
    return problems


def _has_no_effect(value: Any, known: ClientArg) -> bool:
    """Whether an option was given, with a value that is accepted and changes nothing."""
    return value is not None and (known.accepted is None or value in known.accepted)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage, which is pages long and would hide the message."""
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists all options)\n")


def _fields(owner: type[ServerArgs] | type[EngineArgs]) -> list[str]:
    return [one.name for one in dataclasses.fields(owner)]


def _add_fields(group: argparse._ArgumentGroup, owner: type[ServerArgs] | type[EngineArgs]) -> None:
    hints = get_type_hints(owner)
    for one in dataclasses.fields(owner):
        default = None if one.default is MISSING else one.default
        text = one.metadata.get("help", "the model's directory, like MODEL")
        shown = text if default is None else f"{text} (default: %(default)s)"
        group.add_argument(*_names(one.name), default=default, help=shown, **_form(hints[one.name]))


def _add_client_args(group: argparse._ArgumentGroup, known: Mapping[str, ClientArg]) -> None:
    for name, one in known.items():
        text = one.reason if one.accepted is None else f"{one.reason} (taken: {one.default})"
        group.add_argument(*_names(name), default=None, help=text, **_form(one.kind))


def _names(name: str) -> list[str]:
    short = SHORT_FORMS.get(name)
    return [*([] if short is None else [short]), "--" + name.replace("_", "-")]


def _whole_number(text: str) -> int:
    """A number, or vLLM's ``32k`` (of 1,000) and ``32K`` (of 1,024)."""
    if found := _WHOLE_NUMBER.fullmatch(text):
        number, unit = found.groups()
        value = Fraction(number) * (1024 if unit.isupper() else 1000) ** " kmgt".index(unit.lower() or " ")
        if value.denominator == 1:
            return int(value)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number")


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def _form(hint: Any) -> dict[str, Any]:
    """Return the argparse options for a value of this type."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Mapping:
        return {"type": _json_object, "metavar": "JSON"}
    if get_origin(hint) is not None:  # a sequence
        return {"nargs": "+", "type": get_args(hint)[0]}
    return {"type": _whole_number if hint is int else hint}
