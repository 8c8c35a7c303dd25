"""What bash makes of a word: quotes, variables, defaults, arrays, arithmetic; text only, nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.import_verl_script.arithmetic import calculate
from tools.import_verl_script.statements import MAX_BYTES, BashError, closing

_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|@)(\[@\])?(?:(:?)([-=+?])(.*))?", re.DOTALL)
_ALL = re.compile(r'"\$(?:@|\{(?:@|\w+\[@\])\})"')
_BRACES = re.compile(r"\{[^{},.\s'\"]*(?:,|\.\.)[^{}\s'\"]*\}")
_KEY = re.compile(r"[+~]*([\w.@/-]+)=")
_NAMES_AND_NUMBERS = re.compile(r"[\w\s()+*/%-]*")
_BARE_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w*")


@dataclass(frozen=True, order=True)
class Question:
    """What the script leaves open.

    name: the variable or key that ``--set`` answers, a number for an argument of the script · source: what stands there
    """

    line: int
    name: str
    source: str


@dataclass(frozen=True)
class Text:
    """A word's text; where something is ``open``, the script's own words stand in the text."""

    text: str
    open: frozenset[Question] = frozenset()


@dataclass
class Variables:
    """What is known when a word is read. A variable is a list: an array's elements, or its one value.

    fixed: the answers of ``--set``, which win over the script · arguments: the script's own, from $1 on · defaults:
    variables that only the environment would set -> the value that the script has for that case.
    """

    fixed: dict[str, str]
    arguments: list[Text]
    values: dict[str, list[Text]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> list[Text] | None:
        """The value of a variable, an argument, or all of these; None where it has none."""
        if name in self.fixed:
            return [Text(self.fixed[name])]
        if name == "@":
            return self.arguments
        if name.isdigit():
            return self.arguments[int(name) - 1 : int(name)] or None if int(name) else None
        return self.values.get(name)


def joined(parts: Sequence[Text], between: str = " ") -> Text:
    """The words as one text."""
    return Text(between.join(part.text for part in parts), frozenset().union(*(part.open for part in parts)))


def expand(source: str, variables: Variables, line: int, target: str, splits: bool = True) -> list[Text]:
    """The words that bash makes of the text ``source``.

    Args:
        line: of the script, where ``source`` starts.
        target: the variable that gets it, which a question asks for where the word names no key.
        splits: False for the right side of an assignment, which is one word.
    """
    expansion = _Expansion(variables, line, target, splits)
    expansion.read(source, False)
    expansion.end()
    if sum(len(word.text) + 1 for word in expansion.done) > MAX_BYTES:
        raise BashError(f"line {line}: a value is longer than {MAX_BYTES:,} characters")
    return expansion.done


class _Expansion:
    def __init__(self, variables: Variables, line: int, target: str, splits: bool) -> None:
        self.variables, self.line, self.target, self.splits = variables, line, target, splits
        self.done: list[Text] = []
        self.parts: list[Text] = []  # of the word that is being read

    def end(self) -> None:
        if self.parts:
            self.done.append(joined(self.parts, ""))
            self.parts = []

    def add_all(self, words: Sequence[Text], quoted: bool) -> None:
        """Add the elements of an array, which are words of their own; outside of quotes they are cut at spaces too."""
        for number, word in enumerate(words):
            if number:
                self.end()
            if quoted or word.open or not self.splits:
                self.parts.append(word)
                continue
            for piece in re.findall(r"\s+|\S+", word.text):
                if piece.isspace():
                    self.end()
                else:
                    self.parts.append(Text(piece))

    def ask(self, source: str, name: str = "", what: str = "") -> None:
        """Add a part that the text does not give."""
        question = Question(self.line, name or self.name(), what or source)
        self.parts.append(Text(source, frozenset({question})))

    def name(self) -> str:
        """The key of the word that is being read, or the variable that gets it."""
        key = _KEY.match(joined(self.parts[:200], "").text)  # a key has fewer characters, which are parts
        return key[1] if key else self.target

    def one(self, source: str) -> Text:
        """``source`` as one text."""
        return joined(expand(source, self.variables, self.line, self.name(), splits=False))

    def read(self, source: str, quoted: bool) -> None:
        """Expand ``source`` into words."""
        position, line = 0, self.line
        splits = self.splits and not quoted
        while position < len(source):
            char, two = source[position], source[position : position + 2]
            end = position + 1
            if char == "\\":
                end += 1
                if two != "\\\n":
                    is_kept = quoted and two[1:] not in ("$", "`", '"', "\\")
                    self.parts.append(Text(two if is_kept else two[1:]))
            elif char in "'\"" and not quoted:
                end = closing(source, position)
                if not _ALL.fullmatch(source, position, end):  # "$@" of nothing is no word, not an empty one
                    self.parts.append(Text("" if char == '"' else source[position + 1 : end - 1]))
                if char == '"':
                    self.read(source[position + 1 : end - 1], True)
            elif char == "`" or two in ("$(", "${") or (two in ("<(", ">(", "$'", '$"') and not quoted):
                end = closing(source, position)
                self._bracketed(source[position:end], quoted)
            elif char == "$" and (found := _NAME.match(source, position + 1)):
                end = found.end()
                self._parameter(found[0], source[position:end], quoted)
            elif char == "{" and not quoted and (found := _BRACES.match(source, position)):
                end = found.end()
                self.ask(found[0])
            elif splits and char == "#" and not self.parts:
                end = source.find("\n", position) + 1 or len(source)
            elif splits and char.isspace():
                self.end()
            else:
                self.parts.append(Text(char))
            line += source.count("\n", position, end)
            position, self.line = end, line

    def _bracketed(self, whole: str, quoted: bool) -> None:
        if whole.startswith("${"):
            self._parameter(whole[2:-1], whole, quoted)
        elif whole.startswith("$((") and whole.endswith("))"):
            self._arithmetic(whole[3:-2], whole)
        else:
            self.ask(whole)

    def _parameter(self, inner: str, whole: str, quoted: bool) -> None:
        """``$name``, and what ``${...}`` has of arrays and defaults; other changes of a value are left open."""
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            self.ask(whole)
            return
        name, index, colon, operator, word = found.groups()
        value = self.variables.get(name)
        words = value or []
        if name != "@" and index is None:
            words = words[:1]
        is_set = value is not None and not (colon and not any(part.text for part in words))
        if any(part.open for part in words) or (is_set and operator != "+"):
            self.add_all(words, quoted)
        elif operator in (None, "?"):
            self.ask(whole, name, "it is not set in the script")
        elif is_set or operator != "+":
            text = self.one(f'"{word}"' if quoted else word)
            if value is None and name.isidentifier():
                self.variables.defaults[name] = text.text
            if operator == "=":
                self.variables.values[name] = [text]
            self.add_all([text], quoted or '"' in word or "'" in word)

    def _arithmetic(self, expression: str, whole: str) -> None:
        """``$((...))`` of whole numbers."""
        text = self.one(f'"{expression}"')
        if not text.open and _NAMES_AND_NUMBERS.fullmatch(text.text):
            text = self.one(_BARE_NAME.sub(r"(${\g<0>})", text.text))
        if text.open:
            self.parts.append(Text(whole, text.open))
            return
        try:
            self.parts.append(Text(str(calculate(text.text))))
        except ValueError as error:
            self.ask(whole, what=f"{whole} ({error})")
