"""Reads a script from top to bottom and keeps what each of its commands would be given; starts none of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tools.import_verl_script.statements import BashError, Statement, statements
from tools.import_verl_script.words import Place, Question, Text, Variables, expand, expand_one

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_NAMED = re.compile(r"(?<![\w$./-])([A-Za-z_]\w*)(?:\[[^\]\n]*\])?\+?=(?!=)")
_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_TESTS = ("[", "[[", "test")
_QUIET = (
    ":",
    "set",
    "echo",
    "printf",
    "exit",
    "return",
    "true",
    "false",
    "trap",
    "shopt",
    "wait",
    "sleep",
    "let",
    *_TESTS,
)
_EQUAL: dict[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_ORDER: dict[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass(frozen=True)
class Command:
    """A command that the script would start.

    environment: what the script exports before, by name · condition: under which it runs, in the script's words; or "".
    """

    line: int
    words: tuple[Text, ...]
    environment: dict[str, Text]
    condition: str


@dataclass
class Script:
    """What was read.

    unread: (line, text) of what bashlex cannot parse or the text does not tell, such as sourced files.
    """

    variables: Variables
    commands: list[Command] = field(default_factory=list)
    unread: list[tuple[int, str]] = field(default_factory=list)


def read_script(text: str, fixed: Mapping[str, str], arguments: Sequence[str], home: str) -> Script:
    """The commands of a script. ``fixed``: variables that keep a given value · ``arguments``: the script's own.

    BashError where quotes or brackets stay open: what follows has no meaning then.
    """
    variables = Variables(dict(fixed), [Text(argument) for argument in arguments], {"HOME": Text(home)})
    reader = _Reader(Script(variables))
    try:
        for statement in statements(text):
            reader.read(statement)
    except RecursionError:
        raise BashError("nested too deeply to be read") from None
    return reader.script


class _Reader:
    def __init__(self, script: Script) -> None:
        self.script, self.variables = script, script.variables
        self.exported: dict[str, None] = {}
        self.functions: dict[str, tuple[Statement, Any]] = {}
        self.calls: list[str] = []
        self.condition = ""

    def read(self, statement: Statement) -> None:
        """Read a statement; where bashlex cannot, line by line, as if all of it stood under a condition."""
        try:
            nodes = statement.nodes()
        except BashError as error:
            first = _short(statement.text)
            self.script.unread.append(
                (statement.line(len(statement.text) - len(statement.text.lstrip())), f"{first}: {error}")
            )
            lines = list(statements(statement.text, statement.first_line, is_flat=True))
            self._under(statement, 0, first, [lambda: self._read_lines(lines if len(lines) > 1 else [], statement)])
            return
        for node in nodes:
            self.visit(statement, node)

    def _read_lines(self, lines: Sequence[Statement], whole: Statement) -> None:
        for name in _NAMED.findall(whole.text):
            self.variables.assign(name, Text(f"${{{name}}}"))
        for line in lines:
            with suppress(BashError):
                for node in line.nodes():
                    self.visit(line, node)

    def visit(self, statement: Statement, node: Any) -> None:
        """Follow a node of bashlex as bash would, without what only running would tell."""
        if node.kind == "command":
            self._command(statement, node)
        elif node.kind in ("list", "pipeline"):
            self._list(statement, node)
        elif node.kind == "compound":
            before = dict(self.variables.values)
            for part in node.list:
                self.visit(statement, part)
            if getattr(node.list[0], "word", "") == "(":
                self.variables.values = before
        elif node.kind == "function":
            self.functions[_source(statement, node.parts[0])] = (statement, node.parts[-1])
        elif node.kind == "if":
            self._if(statement, node)
        elif node.kind == "for":
            self._for(statement, node)
        elif node.kind in ("while", "until"):
            parts = [part for part in node.parts if part.kind != "reservedword"]
            self._under_parts(statement, node, parts)

    def _list(self, statement: Statement, node: Any) -> None:
        """Commands one after another; what follows a test by ``&&`` or any by ``||`` has a condition."""
        joint, previous = "", None
        for part in node.parts:
            if part.kind in ("operator", "pipe", "reservedword"):
                joint = getattr(part, "op", "")
                continue
            if joint in ("&&", "||") and previous is not None:
                truth = self._truth(statement, previous)
                is_test = _first_word(statement, previous) in _TESTS
                if truth is not None and truth == (joint == "||"):
                    continue
                if truth is None and (is_test or joint == "||"):
                    self._under_parts(statement, previous, [part])
                    continue
            self.visit(statement, part)
            previous = part

    def _if(self, statement: Statement, node: Any) -> None:
        parts = [part for part in node.parts if part.kind != "reservedword"]
        while len(parts) > 1:
            truth = self._truth(statement, parts[0])
            if truth is None:
                self._under_parts(statement, node, parts)
                return
            if truth:
                parts = [parts[1]]
                break
            parts = parts[2:]
        for part in parts:
            self.visit(statement, part)

    def _for(self, statement: Statement, node: Any) -> None:
        words = [part for part in node.parts if part.kind == "word"]
        name, line = _source(statement, words[0]), statement.line(node.pos[0])
        found = [text for word in words[1:] for text in _words(statement, word, self.variables)]
        if len(found) == 1:
            self.variables.assign(name, found[0])
        else:
            self._leave_open(name, line, _source(statement, node))
        self._under_parts(statement, node, [part for part in node.parts if part.kind not in ("reservedword", "word")])

    def _under_parts(self, statement: Statement, node: Any, parts: Sequence[Any]) -> None:
        runs = [lambda part=part: self.visit(statement, part) for part in parts]
        self._under(statement, node.pos[0], _short(_source(statement, node)), runs)

    def _under(self, statement: Statement, position: int, source: str, runs: Sequence[Callable[[], None]]) -> None:
        """Read alternatives of which the text does not tell which one runs; what they assign is open afterwards."""
        before, outer = dict(self.variables.values), self.condition
        changed: dict[str, None] = {}
        for run in runs:
            self.variables.values, self.condition = dict(before), source
            run()
            changed |= {name: None for name, value in self.variables.values.items() if before.get(name) is not value}
        self.variables.values, self.condition = before, outer
        for name in changed:
            old = before.get(name)
            known = old.text if isinstance(old, Text) and not old.open else None
            self._leave_open(name, statement.line(position), source, known)

    def _leave_open(self, name: str, line: int, source: str, before: str | None = None) -> None:
        question = Question(line, name, _short(source), before)
        self.variables.assign(name, Text(f"${{{name}}}", frozenset({question})))

    def _truth(self, statement: Statement, node: Any) -> bool | None:
        """Whether a test holds; None where the text does not tell."""
        parts = [part for part in getattr(node, "parts", []) if part.kind != "operator"]
        if node.kind == "list" and len(parts) == 1:
            return self._truth(statement, parts[0])
        if node.kind == "command" and all(part.kind == "assignment" for part in node.parts):
            return True
        if node.kind != "command" or _first_word(statement, node) not in _TESTS:
            return None
        sources = [_source(statement, part) for part in node.parts if part.kind == "word"][1:]
        place = Place(statement.line(node.pos[0]), "")
        words = [expand_one(source, self.variables, place) for source in sources if source not in ("]", "]]")]
        texts = [word.text for word in words]
        if any(word.open for word in words) or any(letter in texts[-1] for letter in "*?[" if texts):
            return None
        with suppress(ValueError):
            if len(texts) == 2 and texts[0] in ("-z", "-n"):
                return (texts[0] == "-z") == (not texts[1])
            if len(texts) == 3 and texts[1] in _ORDER:
                return _ORDER[texts[1]](int(texts[0]), int(texts[2]))
            if len(texts) == 3 and texts[1] in _EQUAL:
                return _EQUAL[texts[1]](texts[0], texts[2])
        return None

    def _assign(self, statement: Statement, node: Any) -> str:
        """Do ``NAME=value``, ``NAME+=value`` or ``NAME=(...)``; returns the name."""
        found = _ASSIGNMENT.fullmatch(_source(statement, node))
        if found is None:
            return _source(statement, node)
        name, index, more, value = found.groups()
        place = Place(statement.line(node.pos[0]), name)
        if index or (value.startswith("(") and re.match(r"\(\s*\[", value)):
            self._leave_open(name, place.line, found[0])
        elif value.startswith("("):
            self.variables.assign(name, _elements(value[1:-1], self.variables, place), bool(more))
        else:
            self.variables.assign(name, expand_one(value, self.variables, place), bool(more))
        return name

    def _command(self, statement: Statement, node: Any) -> None:
        assignments = [part for part in node.parts if part.kind == "assignment"]
        words = [part for part in node.parts if part.kind == "word"]
        if not words:
            for part in assignments:
                self._assign(statement, part)
            return
        line = statement.line(node.pos[0])
        program = _source(statement, words[0])
        if program in _DECLARING:
            names = [
                self._assign(statement, part)
                for part in (*words[1:], *assignments)
                if _source(statement, part)[0] != "-"
            ]
            self.exported |= dict.fromkeys(names) if program == "export" else {}
        elif program in ("read", "mapfile", "readarray", "unset"):
            for name in (_source(statement, part) for part in words[1:]):
                self.variables.values.pop(name, None)
                if program != "unset" and name.isidentifier():
                    self._leave_open(name, line, _source(statement, node))
        elif program == "shift":
            count = _source(statement, words[1]) if len(words) > 1 else "1"
            self.variables.arguments = self.variables.arguments[int(count) if count.isdigit() else 0 :]
        elif program in ("source", ".", "eval"):
            self.script.unread.append((line, _short(_source(statement, node))))
        elif program in self.functions and program not in self.calls:
            self._call(statement, program, words[1:])
        else:
            self._record(statement, line, words, assignments)

    def _call(self, statement: Statement, name: str, words: Sequence[Any]) -> None:
        """Read a function's body with the arguments of this call."""
        outer = self.variables.arguments
        self.variables.arguments = [text for word in words for text in _words(statement, word, self.variables)]
        self.calls.append(name)
        self.visit(*self.functions[name])
        self.calls.pop()
        self.variables.arguments = outer

    def _record(self, statement: Statement, line: int, words: Sequence[Any], assignments: Sequence[Any]) -> None:
        given = tuple(text for word in words for text in _words(statement, word, self.variables))
        before = dict(self.variables.values)
        own = [self._assign(statement, part) for part in assignments]
        values = ((name, self.variables.get(name)) for name in (*self.exported, *own))
        environment = {name: value for name, value in values if isinstance(value, Text)}
        self.variables.values = before
        if given and given[0].text not in _QUIET:
            self.script.commands.append(Command(line, given, environment, self.condition))


def _elements(inner: str, variables: Variables, place: Place) -> list[Text]:
    """The words between the brackets of an array; comments in it are left out."""
    found: list[Text] = []
    for statement in statements(inner, place.line, is_flat=True):
        with suppress(BashError):
            for node in statement.nodes():
                for part in node.parts if node.kind == "command" else []:
                    found += _words(statement, part, variables, place.target)
    return found


def _words(statement: Statement, node: Any, variables: Variables, target: str = "") -> list[Text]:
    """The words that a word becomes; what it leaves open is asked for by its key, or else by ``target``."""
    source = _source(statement, node)
    key = re.match(r"[+~]*([\w.@/-]+)=", source)
    return expand(source, variables, Place(statement.line(node.pos[0]), key[1] if key else target))


def _source(statement: Statement, node: Any) -> str:
    return statement.text[node.pos[0] : node.pos[1]]


def _first_word(statement: Statement, node: Any) -> str:
    words = [part for part in getattr(node, "parts", []) if part.kind == "word"]
    return _source(statement, words[0]) if words else ""


def _short(source: str) -> str:
    """The first line of a piece of the script, at most 70 characters of it."""
    line = source.strip().split("\n", 1)[0]
    return line if len(line) <= 70 else line[:67] + "..."
