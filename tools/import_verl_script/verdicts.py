"""What the trainer here makes of every key: it acts, has no effect, is refused, or waits for an answer."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import NamedTuple

from tools.import_verl_script.trainer import Trainer
from tools.import_verl_script.words import Text
from verl.trainer.command_line import CommandLine, read_command_line
from verl.trainer.config import ConfigError, PPOTrainerConfig, compose_config, resolve_config, validate_config
from verl.trainer.config.declared import other_names
from verl.trainer.config.engine_keys import rename_sections
from verl.trainer.config.fixed_keys import Given

ACTS, NO_EFFECT, UNCHECKED, OPEN, REFUSED = KINDS = ("acts", "no effect", "not checked", "open", "refused")
_KEY = re.compile(r"[+~]*([\w.@/-]+)")


class Verdict(NamedTuple):
    """What becomes of a key; ``note`` has the reason, or the name under which it acts."""

    kind: str
    key: str
    note: str


@dataclass(frozen=True)
class Judgement:
    """The verdicts on a command line, problems of the config as a whole, and the config where there is one."""

    arguments: list[Text]
    verdicts: list[Verdict]
    problems: list[str]
    config: PPOTrainerConfig | None
    line: CommandLine | None

    @property
    def is_settled(self) -> bool:
        """Whether the trainer accepts the command, and every word of it has a value."""
        return not self.problems and all(verdict.kind in (ACTS, NO_EFFECT) for verdict in self.verdicts)


def judge(trainer: Trainer, answers: Mapping[str, str]) -> Judgement:
    """The verdict on every key of the command. ``answers``: key -> the value in place of the script's."""
    arguments = [text for text in trainer.arguments if _key(text.text) not in answers]
    arguments += [Text(f"{key}={value}") for key, value in answers.items()]
    line = config = None
    try:
        with redirect_stderr(io.StringIO()) as printed, redirect_stdout(io.StringIO()):
            line = read_command_line([text.text for text in arguments if not text.open])
        composed = compose_config(line.overrides, config_name=line.config_name, config_dir=line.config_dir)
        (config, taken), found = resolve_config(composed), list[str]()
    except ConfigError as error:
        config, taken, found = error.config, error.taken, error.problems
    except SystemExit:
        taken, found = [], (printed.getvalue().splitlines() or ["an option shows something and trains nothing"])[-1:]
    found += validate_config(config) if config is not None else []
    reasons = {item.key: item.reason for item in (*taken, *(line.unused if line else ()))}
    verdicts, refused = list[Verdict](), set[str]()
    for text in (text for text in arguments if text.open or not text.text.startswith("-")):
        key = _key(text.text)
        name = _name_here(key)
        own = [sentence for sentence in found if _speaks_of(sentence, text.text, key, name)]
        refused |= {*own}
        if text.open:
            verdicts.append(Verdict(OPEN, key, ", ".join(sorted({question.name for question in text.open}))))
        elif own:
            verdicts.append(Verdict(REFUSED, key, "; ".join(own)))
        elif config is None:
            verdicts.append(Verdict(UNCHECKED, key, ""))
        elif reason := reasons.get(key, reasons.get(name, "")):
            verdicts.append(Verdict(NO_EFFECT, key, reason))
        else:
            verdicts.append(Verdict(ACTS, key, "" if name == key else f"as {name}"))
    return Judgement(arguments, verdicts, [text for text in found if text not in refused], config, line)


def _key(override: str) -> str:
    """The key of ``key=value``, ``+key=value`` or ``~key``."""
    found = _KEY.match(override)
    return found[1] if found else override


def _name_here(key: str) -> str:
    """The name under which a key of upstream acts here; the key itself where it is one, or more than a name changes."""
    given = Given({key: ""})
    rename_sections(given)
    (name,) = given.values or (key,)
    return other_names().get(name, name)


def _speaks_of(sentence: str, override: str, key: str, name: str) -> bool:
    """Whether a problem is that of this override, and not of several together."""
    starts = [f"{before}{known}{end}" for before in ("", "unknown key ") for known in (key, name) for end in " ,:;"]
    return sentence.startswith((f"{override!r} ", *starts))
