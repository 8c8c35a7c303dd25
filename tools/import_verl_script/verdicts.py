"""What the trainer here makes of every key: it acts, has no effect, is refused, or waits for an answer."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import NamedTuple

from omegaconf.errors import OmegaConfBaseException

from tools.import_verl_script.trainer import Trainer
from tools.import_verl_script.words import Text
from verl.trainer.command_line import CommandLine, read_command_line
from verl.trainer.config import (
    ConfigError,
    PPOTrainerConfig,
    WithoutEffect,
    compose_config,
    resolve_config,
    validate_config,
)
from verl.trainer.config.declared import declared_keys, other_names
from verl.trainer.config.engine_keys import rename_sections
from verl.trainer.config.fixed_keys import Given

ACTS, NO_EFFECT, REFUSED, OPEN, UNCHECKED = "acts", "no effect", "refused", "open", "not checked"
_ELSEWHERE = "under other names, see docs/upstream/verl_scripts.md"
_KEY = re.compile(r"[+~]*([\w.@/-]+)(?:=(.*))?", re.DOTALL)


class Verdict(NamedTuple):
    """What becomes of a key; ``note`` has the reason, or the name under which it acts."""

    key: str
    kind: str
    note: str


@dataclass
class Judgement:
    """The verdicts on a command line, problems of the config as a whole, and the config where there is one."""

    arguments: list[Text]
    verdicts: list[Verdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    config: PPOTrainerConfig | None = None
    line: CommandLine | None = None

    @property
    def overrides(self) -> list[Text]:
        """The ``key=value`` among the arguments."""
        return [argument for argument in self.arguments if not argument.text.startswith("-")]


def judge(trainer: Trainer, answers: Mapping[str, str]) -> Judgement:
    """The verdict on every key of the command. ``answers``: key -> the value in place of the script's."""
    kept = [text for text in trainer.arguments if key_of(text.text) not in answers]
    judgement = Judgement([*kept, *(Text(f"{key}={value}") for key, value in answers.items())])
    taken, found = list[WithoutEffect](), list[str]()
    try:
        with redirect_stderr(io.StringIO()) as printed, redirect_stdout(io.StringIO()):
            closed = [text.text for text in judgement.arguments if not text.open]
            judgement.line = read_command_line(closed, trainer.default_config)
    except ConfigError as error:
        found = error.problems
    except SystemExit:
        found = (printed.getvalue().strip().splitlines() or ["an option shows something and trains nothing"])[-1:]
    else:
        judgement.config, taken, found = _resolved(judgement.line)
    if judgement.config is not None:
        found += validate_config(judgement.config)
    reasons, refused = {item.key: item.reason for item in taken}, set[str]()
    for text in judgement.overrides:
        key = key_of(text.text)
        name = _name_here(key)
        own = [sentence for sentence in found if _speaks_of(sentence, text.text)]
        refused |= {*own}
        if text.open:
            verdict = Verdict(key, OPEN, ", ".join(sorted({question.name for question in text.open})))
        elif own:
            verdict = Verdict(key, REFUSED, "; ".join(own))
        elif judgement.config is None:
            verdict = Verdict(key, UNCHECKED, "")
        elif reason := reasons.get(key, reasons.get(name, "")):
            verdict = Verdict(key, NO_EFFECT, reason)
        else:
            is_own = name in declared_keys() or any(name.startswith(f"{known}.") for known in declared_keys())
            verdict = Verdict(key, ACTS, "" if name == key and is_own else f"as {name}" if is_own else _ELSEWHERE)
        judgement.verdicts.append(verdict)
    judgement.problems = [sentence for sentence in found if sentence not in refused]
    return judgement


def _name_here(key: str) -> str:
    """The name under which a key of upstream acts here; the key itself where it is one, or more than a name changes."""
    given = Given({key: ""})
    rename_sections(given)
    (name,) = given.values or (key,)
    return other_names().get(name, name)


def key_of(override: str) -> str:
    """The key of ``key=value``, ``+key=value`` or ``~key``."""
    found = _KEY.match(override)
    return found[1] if found else override


def _resolved(line: CommandLine) -> tuple[PPOTrainerConfig | None, list[WithoutEffect], list[str]]:
    """The config of the overrides that can be used, what has no effect, and the problems of the others."""
    overrides, problems = list(line.overrides), list[str]()
    config: PPOTrainerConfig | None
    while True:
        try:
            composed = compose_config(overrides, config_name=line.config_name, config_dir=line.config_dir)
            config, taken = resolve_config(composed)
            return config, [*line.unused, *taken], problems
        except ConfigError as error:
            config, found = error.config, error.problems
        except OmegaConfBaseException as error:
            config, found = None, [str(error).split("\n", 1)[0]]
        problems += found
        usable = [text for text in overrides if not any(_speaks_of(problem, text) for problem in found)]
        if len(usable) == len(overrides):
            return config, [*line.unused], problems
        overrides = usable


def _speaks_of(sentence: str, override: str) -> bool:
    """Whether a problem is that of this override, and not of several together."""
    keys = (key_of(override), _name_here(key_of(override)))
    starts = [
        start
        for key in keys
        for start in (f"{key} ", f"{key},", f"{key}:", f"unknown key {key};", f"unknown key {key},")
    ]
    return sentence.startswith((f"{override!r} ", *starts))
