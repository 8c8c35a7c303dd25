"""What bash makes of a word: quotes, variables, defaults, arrays, arithmetic; text only, nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tools.import_verl_script.arithmetic import calculate
from tools.import_verl_script.statements import closing

_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*#])(?:\[([@*])\])?((?![\[\w]).*)", re.DOTALL)
_BRACES = re.compile(r"\{[^{}\s'\"]*(?:,|\.\.)[^{}\s'\"]*\}")


@dataclass(frozen=True)
class Question:
    """What the script leaves open.

    name: the variable or key that ``--set`` answers, a number for an argument of the script · source: what stands there
    · before: its value before a condition.
    """

    line: int
    name: str
    source: str
    before: str | None = None


@dataclass(frozen=True)
class Text:
    """A word's text; where something is ``open``, the script's own words stand in the text."""

    text: str
    open: frozenset[Question] = frozenset()


@dataclass(frozen=True)
class Place:
    """Where a word stands: its line, and the variable or key that gets it."""

    line: int
    target: str


@dataclass
class Variables:
    """What is known when a word is read.

    fixed: the answers of ``--set``, which win over the script · arguments: the script's own, from $1 on · defaults:
    variables that only the environment would set -> the value that the script has for that case.
    """

    fixed: dict[str, str]
    arguments: list[Text]
    values: dict[str, Text | list[Text]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> Text | list[Text] | None:
        """The value of a variable, an argument, or all of these; None where it has none."""
        if name in self.fixed:
            return Text(self.fixed[name])
        if name in ("@", "*"):
            return self.arguments
        if name == "#":
            return Text(str(len(self.arguments)))
        if name.isdigit() and name != "0":
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
        return self.values.get(name)

    def assign(self, name: str, value: Text | list[Text], is_more: bool = False) -> None:
        """``NAME=value`` or, with ``is_more``, ``NAME+=value``."""
        old = self.values.get(name)
        if is_more and old is not None:
            if isinstance(old, list) or isinstance(value, list):
                value = [*_listed(old), *_listed(value)]
            else:
                value = Text(old.text + value.text, old.open | value.open)
        self.values[name] = value


class _Fields:
    """The words that one word becomes."""

    def __init__(self) -> None:
        self.done: list[Text] = []
        self._parts: list[str] = []
        self._open: frozenset[Question] = frozenset()

    def add(self, part: Text) -> None:
        self._parts.append(part.text)
        self._open |= part.open

    def end(self) -> None:
        if self._parts:
            self.done.append(Text("".join(self._parts), self._open))
            self._parts, self._open = [], frozenset()

    def add_all(self, parts: Sequence[Text], splits: bool) -> None:
        """Add the elements of an array, which are words of their own; ``splits``: they are cut at spaces too."""
        for number, part in enumerate(parts):
            if number:
                self.end()
            pieces = part.text.split() if splits and not part.open else None
            if pieces is None:
                self.add(part)
                continue
            if part.text[:1].isspace():
                self.end()
            for index, piece in enumerate(pieces):
                if index:
                    self.end()
                self.add(Text(piece))
            if part.text[-1:].isspace():
                self.end()


def expand(source: str, variables: Variables, place: Place, splits: bool = True) -> list[Text]:
    """The words that bash makes of the word ``source``; ``splits`` is False for the right side of an assignment."""
    fields = _Fields()
    _Expansion(variables, place, splits).read(source, fields, False)
    fields.end()
    return fields.done


def expand_one(source: str, variables: Variables, place: Place) -> Text:
    """The right side of an assignment, which is one text."""
    return joined(expand(source, variables, place, splits=False))


def joined(parts: Sequence[Text]) -> Text:
    """The words as one text."""
    return Text(" ".join(part.text for part in parts), frozenset().union(*(part.open for part in parts)))


@dataclass(frozen=True)
class _Expansion:
    variables: Variables
    place: Place
    splits: bool

    def read(self, source: str, fields: _Fields, quoted: bool) -> None:
        """Expand ``source`` into ``fields``."""
        position = 0
        while position < len(source):
            char, two = source[position], source[position : position + 2]
            end = position + 1
            if char == "\\":
                end += 1
                keeps = quoted and two[1:] not in ("$", "`", '"', "\\", "\n")
                fields.add(Text("" if two == "\\\n" else two if keeps else two[1:]))
            elif char in "'\"" and not quoted:
                end = closing(source, position)
                inner = source[position + 1 : end - 1]
                fields.add(Text(inner if char == "'" else ""))
                if char == '"':
                    self.read(inner, fields, True)
            elif char == "`" or (two in ("<(", ">(") and not quoted):
                end = closing(source, position + len(two) - 1 if char != "`" else position)
                fields.add(self.unknown(source[position:end]))
            elif char == "$":
                end = self._dollar(source, position, fields, quoted)
            elif char == "{" and not quoted and (found := _BRACES.match(source, position)):
                end = found.end()
                fields.add(self.unknown(found[0]))
            elif char == "~" and not quoted and position == 0 and two[1:] in ("", "/"):
                home = self.variables.get("HOME")
                fields.add(home if isinstance(home, Text) else Text(char))
            elif char.isspace() and not quoted and self.splits:
                fields.end()
            else:
                fields.add(Text(char))
            position = end

    def unknown(self, source: str, name: str | None = None) -> Text:
        """A part that the text does not give."""
        return Text(source, frozenset({Question(self.place.line, name or self.place.target, source)}))

    def _dollar(self, source: str, position: int, fields: _Fields, quoted: bool) -> int:
        two = source[position : position + 2]
        if two in ("$(", "${") or (two == "$'" and not quoted):
            end = closing(source, position, quoted)
            whole, inner = source[position:end], source[position + 2 : end - 1]
            if two == "${":
                self._parameter(inner, whole, fields, quoted)
            elif two == "$(" and inner.startswith("(") and inner.endswith(")"):
                fields.add(self._arithmetic(inner[1:-1], whole))
            else:
                fields.add(self.unknown(whole))
            return end
        if two == '$"' and not quoted:
            return position + 1
        if found := _NAME.match(source, position + 1):
            self._parameter(found[0], "$" + found[0], fields, quoted)
            return found.end()
        fields.add(Text("$"))
        return position + 1

    def _parameter(self, inner: str, whole: str, fields: _Fields, quoted: bool) -> None:
        """``$name`` and everything in ``${...}``."""
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            fields.add(self.unknown(whole))
            return
        name, index, operation = found.groups()
        value = self.variables.get(name)
        is_all = name in ("@", "*") or index is not None
        if value is not None and not is_all:
            value = _listed(value)[0] if _listed(value) else Text("")
        if default := re.fullmatch(r"(:?)([-=+?])(.*)", operation, re.DOTALL):
            self._default(name, value, default.groups(), whole, fields, quoted)
        elif value is None:
            fields.add(self.unknown(whole, name))
        else:
            parts = self._shortened(name, _listed(value), operation, whole) if operation else _listed(value)
            if quoted and "*" in (name, index):
                parts = [joined(parts)]
            fields.add_all(parts, self.splits and not quoted)

    def _default(
        self,
        name: str,
        value: Text | list[Text] | None,
        parts: tuple[str, ...],
        whole: str,
        fields: _Fields,
        quoted: bool,
    ) -> None:
        """``${name:-word}``, and the same with ``=``, ``+`` and ``?``, each also without the colon."""
        colon, operator, word = parts
        listed = _listed(value) if value is not None else []
        is_set = value is not None and not (colon and not any(part.text for part in listed))
        if any(part.open for part in listed):
            fields.add_all(listed, False)
        elif is_set and operator != "+":
            fields.add_all(listed, self.splits and not quoted)
        elif operator == "?":
            fields.add(self.unknown(whole, name))
        elif operator != "+":
            inner = expand_one(f'"{word}"' if quoted else word, self.variables, self.place) if word else Text("")
            if value is None and not name.isdigit() and name not in ("@", "*"):
                self.variables.defaults[name] = inner.text
            if operator == "=":
                self.variables.assign(name, inner)
            if quoted:
                fields.add(inner)
            else:
                self.read(word, fields, False)
        elif is_set:
            self.read(word, fields, quoted)

    def _shortened(self, name: str, parts: list[Text], operation: str, whole: str) -> list[Text]:
        """``${name%pattern}``, ``${name##pattern}`` and the like; other changes of a value are left open."""
        cut = re.fullmatch(r"(%%|%|##|#)(.*)", operation, re.DOTALL)
        pattern = expand_one(cut[2], self.variables, self.place) if cut else Text("")
        if cut is None or pattern.open:
            return [self.unknown(whole, name)]
        return [part if part.open else Text(_without(part.text, pattern.text, cut[1])) for part in parts]

    def _arithmetic(self, expression: str, whole: str) -> Text:
        """``$((...))`` of whole numbers."""
        missing: set[Question] = set()

        def value(name: str) -> int:
            given = self.variables.get(name)
            part = given if isinstance(given, Text) else self.unknown(f"${name}", name)
            missing.update(part.open)
            return 1 if part.open else int(part.text)

        text = expand_one(f'"{expression}"', self.variables, self.place)
        if text.open:
            return Text(whole, text.open)
        try:
            result = calculate(text.text, value)
        except ValueError as error:
            reason = f"{whole} ({error})"
            return Text(whole, frozenset(missing) or self.unknown(reason).open)
        return Text(whole, frozenset(missing)) if missing else Text(str(result))


def _listed(value: Text | list[Text]) -> list[Text]:
    return value if isinstance(value, list) else [value]


def _without(text: str, pattern: str, end: str) -> str:
    """``text`` without the shortest (``%``, ``#``) or longest part at its end or start that the pattern fits."""
    cuts = range(len(text) + 1)
    if end[0] == "%":
        fits = [cut for cut in cuts if fnmatchcase(text[cut:], pattern)]
        return text if not fits else text[: max(fits) if end == "%" else min(fits)]
    fits = [cut for cut in cuts if fnmatchcase(text[:cut], pattern)]
    return text if not fits else text[min(fits) if end == "#" else max(fits) :]
