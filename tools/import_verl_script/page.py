"""What the command prints: the command for here, the keys, the plan, and what a person has to decide."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tools.import_verl_script.script import Script
from tools.import_verl_script.trainer import MAIN, Trainer
from tools.import_verl_script.verdicts import KINDS, Judgement
from tools.import_verl_script.words import Question, Text
from verl.trainer.config import variables_without_effect

_SECRET = r"(?:\w*_)?(?:(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)"
_HIDDEN = "<hidden>"
_ASSIGNED = re.compile(rf"\b({_SECRET})(\s*=\s*|\"\s*:\s*\"?)(?!\.\.\.)(\"[^\"]*\"?|'[^']*'?|[^\s,}}]+)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def hidden(text: str, named: Mapping[str, str]) -> str:
    """``text`` without secrets: the values of variables whose names say so, and log-ins in addresses."""
    is_secret = re.compile(_SECRET, re.IGNORECASE).fullmatch
    values = {value for name, value in named.items() if is_secret(name) and len(value) > 3 and not value.isdigit()}
    for value in sorted(values, key=len, reverse=True):  # one may stand within another
        text = text.replace(value, _HIDDEN)
    return _LOGIN.sub(_HIDDEN, _ASSIGNED.sub(rf"\1\2{_HIDDEN}", text))


def page(name: str, script: Script, found: list[Trainer], judgement: Judgement, plan: list[str], status: int) -> str:
    """Everything that is printed of a script. ``found``: its trainers, of which the first was judged."""
    trainer = found[0]
    counts = Counter(verdict.kind for verdict in judgement.verdicts)
    keys = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    command = " \\\n    ".join([f"python -m {trainer.module_here}", *map(_word, judgement.arguments)])
    decisions = "\n".join(f"{number:>2}. {text}" for number, text in enumerate(_decisions(script, found, judgement), 1))
    return "\n".join(
        [
            f"{name}, line {trainer.command.line}: {'not yet: see below' if status else 'can run here'} ({keys})",
            f"\nThe command here; --check all at its end only checks it and its files:\n\n{command}\n\nKeys",
            *(
                f"{kind:<12}{note if note.startswith(key) else ': '.join(filter(None, (key, note)))}"
                for kind, key, note in sorted(judgement.verdicts, key=lambda verdict: KINDS.index(verdict.kind))
            ),
            *(f"refused: {problem}" for problem in judgement.problems),
            *plan,
            *(["\nFor you to decide", decisions] if decisions else []),
        ]
    )


def _word(word: Text) -> str:
    """A word for a shell; where something is open the script's own words stand between double quotes."""
    if word.open:
        return '"' + word.text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return shlex.quote(word.text)


def _decisions(script: Script, found: Sequence[Trainer], judgement: Judgement) -> Iterator[str]:
    """What a person has to decide, the questions first."""
    trainer, command = found[0], found[0].command
    for question in sorted({question for text in judgement.arguments for question in text.open}):
        yield _question(question)
    if others := ", ".join(str(other.command.line) for other in found[1:]):
        yield f"this is the trainer of line {command.line}; there are more, on lines {others}: --line N takes another"
    if command.condition:
        yield f"line {command.line}: the command runs under a condition, which is not checked: {command.condition}"
    if not trainer.is_known:
        yield f"{trainer.module} is not here: {MAIN} takes its keys, and nothing of its code"
    if trainer.starter:
        starter = " ".join(text.text for text in trainer.starter)
        yield f"line {command.line}: started by: {starter}; its options are not carried over"
    without = {item.key: item.reason for item in variables_without_effect(command.environment)}
    for name, reason in without.items():
        yield f"{name} has no effect here: {reason}"
    if exported := {name: value for name, value in command.environment.items() if name not in without}:
        texts = (f"{name}={shlex.quote(value)}" for name, value in exported.items())
        yield f"exported by the script; export what a library needs: {' '.join(texts)}"
    if defaults := ", ".join(f"{name}={value}" for name, value in sorted(script.variables.defaults.items())):
        yield f"the script's defaults stand, as the environment is not read: {defaults} (--set changes them)"
    if rest := [f"{other.words[0].text} (line {other.line})" for other in script.commands if other is not command]:
        yield f"not run by this command: {', '.join(dict.fromkeys(rest))}"
    if script.unread:
        yield f"not read: {'; '.join(script.unread)}"


def _question(question: Question) -> str:
    """A question with where it stands and how it is answered."""
    answer = f"give --set {question.name}=..." if question.name else "write it out in a copy of the script"
    if question.name.isdigit():
        answer = "give it after --"
    return f"line {question.line}: {question.name or 'the command'}: {question.source}: {answer}"
