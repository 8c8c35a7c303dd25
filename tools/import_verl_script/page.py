"""What the command prints: the command for here, the keys, the plan, and what a person has to decide."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

from tools.import_verl_script.script import Script
from tools.import_verl_script.trainer import MAIN, Trainer
from tools.import_verl_script.verdicts import ACTS, NO_EFFECT, OPEN, REFUSED, UNCHECKED, Judgement, Verdict
from tools.import_verl_script.words import Question, Text
from verl.trainer.config import variables_without_effect
from verl.trainer.config.declared import declared_keys
from verl.workers.config.keys import flat

_SECRET = r"(?:\w*_)?(?:(?:API|ACCESS|SECRET|PRIVATE|AUTH)_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)"
_HIDDEN = "<hidden>"
_ASSIGNED = re.compile(rf"\b({_SECRET})(\s*=\s*|\"\s*:\s*\"?)(?!\.\.\.)(\"[^\"]*\"?|'[^']*'?|[^\s,}}]+)", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KINDS = {ACTS: "green", NO_EFFECT: "dim", REFUSED: "red", OPEN: "yellow", UNCHECKED: "yellow"}
# Variables that libraries below read, so that the trainer's processes need them.
_PASSED_ON = re.compile(
    r"(HCCL|NCCL|GLOO|ASCEND|ACL|CUDA|TORCH|PYTORCH|NPU|OMP|RAY|HF|WANDB|SWANLAB|MLFLOW|TOKENIZERS|TASK_QUEUE|CPU_AFFINITY|"
    r"LD|PYTHON|TMP)\w*|(https?|no|all)_proxy|VLLM_(HOST_IP|API_KEY)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Secrets:
    """Hides what nobody must see on a screen: values of variables whose names say so, and log-ins in addresses."""

    values: tuple[str, ...]

    def hidden(self, text: str) -> str:
        """``text`` without secrets."""
        for value in self.values:
            text = text.replace(value, _HIDDEN)
        return _LOGIN.sub(_HIDDEN, _ASSIGNED.sub(rf"\1\2{_HIDDEN}", text))


def secrets_of(named: Mapping[str, Any]) -> Secrets:
    """The secrets among variables, by their names; the longest first, as one may stand within another."""
    found = {value.text for name, value in named.items() if re.fullmatch(_SECRET, name, re.IGNORECASE)
             and isinstance(value, Text) and len(value.text) > 3 and not value.text.isdigit()}  # fmt: skip
    return Secrets(tuple(sorted(found, key=len, reverse=True)))


@dataclass(frozen=True)
class Page:
    """Everything that is printed of a script."""

    name: str
    script: Script
    trainer: Trainer
    judgement: Judgement
    plan: Sequence[str]
    others: Sequence[int]  # lines of further trainers
    is_open: bool

    def show(self, console: Console, secrets: Secrets, shows_all: bool) -> None:
        """Print it on ``console``; ``shows_all``: a line for every key."""

        def say(text: str, style: str = "") -> None:
            console.print(RichText(secrets.hidden(text), style), soft_wrap=True)

        counts = {kind: sum(verdict.kind == kind for verdict in self.judgement.verdicts) for kind in _KINDS}
        counts[REFUSED] += len(self.judgement.problems)
        verdict = "not yet: see below" if self.is_open else "can run here"
        keys = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        say(f"{self.name}, line {self.trainer.command.line}: {verdict} ({keys})", "yellow" if self.is_open else "green")
        say("\nThe command here; --check all at its end only checks it and its files:\n", "bold")
        say(command_text(self.trainer.module_here, self.judgement.arguments))
        say("\nKeys" if shows_all else "\nKeys; --all has a line for each", "bold")
        self._show_keys(console, secrets, shows_all)
        for problem in self.judgement.problems:
            say(f"refused: {problem}", "red")
        for line in self.plan:
            say(f"plan: {line}")
        if decisions := list(self._decisions()):
            say("\nFor you to decide", "bold")
        for number, text in enumerate(decisions, 1):
            say(f"{number:>2}. {text}")

    def _show_keys(self, console: Console, secrets: Secrets, shows_all: bool) -> None:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for kind, names, note in _rows(self.judgement.verdicts, shows_all):
            text = secrets.hidden(note if note.startswith(names) else f"{names}: {note}" if note else names)
            table.add_row(RichText(kind, _KINDS[kind]), RichText(text))
        console.print(table)

    def _decisions(self) -> Iterator[str]:
        """What a person has to decide, the questions first."""
        command, arguments = self.trainer.command, self.judgement.arguments
        asked = {question for text in arguments for question in text.open}
        for question in sorted(asked, key=lambda question: (question.line, question.name)):
            yield question_text(question)
        if self.others:
            yield (
                f"the script starts a trainer on lines {', '.join(map(str, sorted([command.line, *self.others])))}; "
                f"this is line {command.line}: --line N takes another"
            )
        if command.condition:
            yield f"line {command.line}: the command runs under a condition, which is not checked: {command.condition}"
        if not self.trainer.is_known:
            yield (
                f"{self.trainer.module} is not one of verl's own trainers that are here: {MAIN} takes the keys, "
                "and nothing of that module's code"
            )
        if starter := " ".join(text.text for text in self.trainer.starter):
            yield f"line {command.line}: started by: {starter}; its options are not carried over"
        yield from self._variables()
        if defaults := ", ".join(f"{name}={value}" for name, value in sorted(self.script.variables.defaults.items())):
            yield f"the script's defaults stand, as the environment is not read: {defaults} (--set changes them)"
        yield from _missing_paths(self.judgement)
        found = {
            f"{found.words[0].text} (line {found.line})": None for found in self.script.commands if found is not command
        }
        if others := [text for text in found if not text.startswith("tee ")]:
            yield f"not run by this command: {_some(others)}"
        if self.script.unread:
            yield "not read: " + "; ".join(
                text if "line " in text else f"line {line}: {text}" for line, text in self.script.unread
            )

    def _variables(self) -> Iterator[str]:
        """The exported variables: without effect, passed on, or read by nothing."""
        given = {name: value.text for name, value in self.trainer.command.environment.items()}
        without = {item.key: item.reason for item in variables_without_effect(given)}
        for name, reason in without.items():
            yield f"{name} has no effect here: {reason}"
        passed = {name: value for name, value in given.items() if name not in without and _PASSED_ON.fullmatch(name)}
        if passed:
            texts = (
                f"{name}={_HIDDEN if re.fullmatch(_SECRET, name, re.IGNORECASE) else shlex.quote(value)}"
                for name, value in passed.items()
            )
            yield f"export these yourself, libraries read them: {' '.join(texts)}"
        if rest := [name for name in given if name not in without and name not in passed]:
            yield f"exported, and read by nothing here: {', '.join(rest)}"


def question_text(question: Question) -> str:
    """A question with where it stands and how it is answered."""
    name, source = question.name, question.source
    if name.isdigit():
        return f"line {question.line}: argument {name} of the script: give it after --"
    if not name:
        return f"line {question.line}: {source}: what is it? write it out in a copy of the script"
    is_unset = source.startswith((f"${name}", f"${{{name}"))
    what = f"{name} is not set in the script:" if is_unset else f"{name}: {source}: what is it?"
    example = question.before if question.before is not None else "..."
    return f"line {question.line}: {what} give --set {name}={shlex.quote(example) if example != '...' else example}"


def command_text(module: str, arguments: Iterable[Text]) -> str:
    """The command for a shell; where something is open the script's own words stand between double quotes."""
    words = [shlex.quote(word.text) if not word.open else _double_quoted(word.text) for word in arguments]
    lines, current = list[str](), f"python -m {module}"
    for word in words:
        if len(current) + len(word) > 116:
            lines.append(current)
            current = f"    {word}"
        else:
            current += f" {word}"
    return " \\\n".join([*lines, current])


def _double_quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rows(verdicts: Sequence[Verdict], shows_all: bool) -> Iterator[tuple[str, str, str]]:
    """(kind, keys, note): a row for each key, or one for those with the same note, which share their section's name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        alone = verdict.key if shows_all else ""
        groups.setdefault((verdict.kind, verdict.note or alone), []).append(verdict.key)
    for kind in _KINDS:
        for (own, note), keys in groups.items():
            if own == kind:
                yield kind, keys[0] if shows_all and len(keys) == 1 else _by_section(keys), "" if note in keys else note


def _by_section(keys: Sequence[str]) -> str:
    """``data.{a, b} trainer.c``: keys under the name of their section."""
    sections: dict[str, list[str]] = {}
    for key in dict.fromkeys(keys):
        section, _, leaf = key.rpartition(".")
        sections.setdefault(section, []).append(leaf)
    texts = []
    for section, leaves in sections.items():
        inner = leaves[0] if len(leaves) == 1 else "{" + ", ".join(leaves) + "}"
        texts.append(f"{section}.{inner}" if section else inner)
    return "  ".join(texts)


def _missing_paths(judgement: Judgement) -> Iterator[str]:
    """The inputs that the command names and that do not exist on this machine."""
    given = [verdict.note.removeprefix("as ") or verdict.key for verdict in judgement.verdicts if verdict.kind == ACTS]
    if judgement.config is None:
        return
    from dataclasses import asdict

    values = dict(flat(asdict(judgement.config)))
    for key in given:
        declared = declared_keys().get(key)
        if declared is None or not declared.key.is_path or key.endswith("_dir") or not values.get(key):
            continue
        paths = values[key] if isinstance(values[key], list) else [values[key]]
        missing = [str(path) for path in paths if not Path(str(path)).exists()]
        if missing:
            yield f"{key}: not on this machine: {', '.join(missing)}"


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return ", ".join(texts[:8]) + more
