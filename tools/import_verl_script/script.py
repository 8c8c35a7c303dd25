"""Reads a script from top to bottom and keeps what each of its commands would be given; starts none of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.import_verl_script.statements import BashError, parsed, statements
from tools.import_verl_script.words import Question, Text, Variables, expand, joined

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_NAMED = re.compile(r"(?<![\w$./-])([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?=(?!=)")
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_QUIET = re.compile(r":|set|echo|printf|exit|return|true|false|trap|shopt|wait|sleep|let|test|tee")


@dataclass(frozen=True)
class Command:
    """A command that the script would start.

    environment: what the script exports before, by name · condition: under which it runs, in the script's words; or "".
    """

    line: int
    words: tuple[Text, ...]
    environment: dict[str, str]
    condition: str


def read_script(text: str, fixed: Mapping[str, str], arguments: Sequence[str], home: str) -> Script:
    """The commands of a script. ``fixed``: variables that keep a given value · ``arguments``: the script's own.

    BashError where quotes or brackets stay open: what follows has no meaning then.
    """
    script = Script(Variables(dict(fixed), [Text(argument) for argument in arguments], {"HOME": [Text(home)]}))
    try:
        for script.first_line, script.text, skeleton in statements(text):
            script.read(skeleton)
    except RecursionError:
        raise BashError(f"line {script.first_line}: nested too deeply to be read") from None
    return script


@dataclass
class Script:
    """What was read so far.

    unread: what bashlex cannot parse or the text does not tell, such as sourced files · text, first_line: the statement
    that is being read; positions of bashlex's nodes are in it.
    """

    variables: Variables
    commands: list[Command] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    exported: dict[str, None] = field(default_factory=dict)
    condition: str = ""
    text: str = ""
    first_line: int = 1

    def read(self, skeleton: str) -> None:
        """Read the statement."""
        nodes = parsed(skeleton)
        if nodes is None:
            self._skip((len(skeleton) - len(skeleton.lstrip()), len(skeleton)))
        for node in nodes or []:
            self.visit(node)

    def visit(self, node: Any) -> None:
        """Follow a node of bashlex as bash would, without what only running would tell."""
        inner = getattr(node, "list", None) or getattr(node, "parts", [])
        parts = [part for part in inner if part.kind not in ("reservedword", "pipe", "redirect")]
        if node.kind == "command":
            self._command(node)
        elif node.kind == "function":
            self._skip(node.pos)
        elif node.kind == "list":
            for before, part in zip([None, *parts], parts, strict=False):
                if getattr(before, "op", "") in ("&&", "||"):
                    self._under((before.pos[0], part.pos[1]), [part])
                else:
                    self.visit(part)
        elif node.kind in ("if", "while", "until", "for") or self.text[node.pos[0]] == "(":
            if node.kind == "for":
                self._leave_open(self._source(parts[0].pos), node.pos)
            self._under(node.pos, [part for part in parts if part.kind != "word"])
        else:
            for part in parts:
                self.visit(part)

    def _under(self, pos: tuple[int, int], parts: Sequence[Any]) -> None:
        """Read parts of which the text does not tell whether they run; what they assign is open afterwards."""
        before, outer = self.variables.values, self.condition
        changed: dict[str, None] = {}
        for part in parts:
            self.variables.values, self.condition = dict(before), self._short(pos)
            self.visit(part)
            changed |= {name: None for name, value in self.variables.values.items() if before.get(name) is not value}
        self.variables.values, self.condition = before, outer
        for name in changed:
            self._leave_open(name, pos)

    def _skip(self, pos: tuple[int, int]) -> None:
        """Leave a piece unread, and open what it may assign."""
        self.unread.append(f"line {self._line(pos)}: {self._short(pos)}")
        for name in _NAMED.findall(self._source(pos)):
            self._leave_open(name, pos)

    def _leave_open(self, name: str, pos: tuple[int, int]) -> None:
        question = Question(self._line(pos), name, self._short(pos))
        self.variables.values[name] = [Text(f"${{{name}}}", frozenset({question}))]

    def _assign(self, node: Any) -> str:
        """Do ``NAME=value``, ``NAME+=value`` or ``NAME=(...)``; returns the name."""
        source, line = self._source(node.pos), self._line(node.pos)
        found = _ASSIGNMENT.fullmatch(source)
        if found is None:
            return source
        name, index, more, value = found.groups()
        old = self.variables.values.get(name, []) if more else []
        if index or re.match(r"\(\s*\[", value):
            self._leave_open(name, node.pos)
        elif value.startswith("("):
            self.variables.values[name] = [*old, *expand(value[1:-1], self.variables, line, name)]
        else:
            words = expand(value, self.variables, line, name, splits=False)
            self.variables.values[name] = [joined([*old[:1], joined(words)], ""), *old[1:]]
        return name

    def _command(self, node: Any) -> None:
        assignments = [part for part in node.parts if part.kind == "assignment"]
        words = [part for part in node.parts if part.kind == "word"]
        program = self._source(words[0].pos) if words else ""
        if not words or program in _DECLARING:
            given = [part for part in (*words[1:], *assignments) if self.text[part.pos[0]] != "-"]
            names = [self._assign(part) for part in given]
            self.exported |= dict.fromkeys(names) if program == "export" else {}
        elif program in ("read", "mapfile", "readarray", "unset"):
            for part in words[1:]:
                self._leave_open(self._source(part.pos), node.pos)
        elif program == "shift" and not self.condition:
            count = self._source(words[1].pos) if len(words) > 1 else "1"
            self.variables.arguments = self.variables.arguments[int(count) if count.isdigit() else 0 :]
        elif program in ("source", ".", "eval") or program.startswith(("case ", "case\t")):
            self._skip(node.pos)
        elif program[0] not in "[(":
            self._record(node, words, assignments)

    def _record(self, node: Any, words: Sequence[Any], assignments: Sequence[Any]) -> None:
        lines = [(self._source(word.pos), self._line(word.pos)) for word in words]
        given = [text for source, line in lines for text in expand(source, self.variables, line, "")]
        before = dict(self.variables.values)
        values = {name: self.variables.get(name) for name in (*self.exported, *map(self._assign, assignments))}
        environment = {name: value[0].text for name, value in values.items() if value}
        self.variables.values = before
        if given and not _QUIET.fullmatch(given[0].text):
            self.commands.append(Command(self._line(node.pos), tuple(given), environment, self.condition))

    def _line(self, pos: tuple[int, int]) -> int:
        return self.first_line + self.text.count("\n", 0, pos[0])

    def _source(self, pos: tuple[int, int]) -> str:
        return self.text[pos[0] : pos[1]]

    def _short(self, pos: tuple[int, int]) -> str:
        """The first line of a piece of the script, at most 70 characters of it."""
        line = self._source(pos).strip().split("\n", 1)[0]
        return line if len(line) <= 70 else line[:67] + "..."
