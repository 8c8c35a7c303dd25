"""A bash script as statements that bashlex has parsed.

bashlex knows neither arrays, arithmetic, ``[[ ]]`` nor ``case``. It gets a skeleton of the script, of the same length,
in which quotes, expansions, arrays, comments and here-documents are blanked out: positions are the script's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bashlex

MAX_BYTES = 256 * 1024
_ENDS = {'"': '"', "`": "`", "(": ")", "{": "}"}
_OPENING, _CLOSING = {"if", "for", "while", "until", "select", "case", "{"}, {"fi", "done", "esac", "}"}
_BEFORE_COMMAND = {"", "then", "do", "else", "elif", "if", "while", "until", "{", "!", "time"}
_HERE = re.compile(r"<<(-?)[ \t]*(\\?[\w.]+|'[^'\n]*'|\"[^\"\n]*\")")
_LINE_GOES_ON = ("|", "&&", "()")


class BashError(ValueError):
    """The text is no bash; the message begins with the line."""


@dataclass(frozen=True)
class Statement:
    """A piece of the script between two ends of lines at which nothing is open.

    text: as it stands in the script · skeleton: what bashlex parses, of the same length · first_line: from 1 on.
    """

    text: str
    skeleton: str
    first_line: int

    def line(self, position: int) -> int:
        """The script's line of a position in ``text``."""
        return self.first_line + self.text.count("\n", 0, position)

    def nodes(self) -> list[Any]:
        """bashlex's nodes; BashError with the reason where it finds none."""
        if not self.skeleton.strip():
            return []
        try:
            return list(bashlex.parse(self.skeleton.rstrip()))
        except RecursionError:
            raise BashError(f"line {self.first_line}: nested too deeply to be read") from None
        except (bashlex.errors.ParsingError, NotImplementedError, AttributeError, IndexError, AssertionError) as error:
            reason = str(error).split("(position")[0].strip() or type(error).__name__
            raise BashError(f"line {self.first_line}: cannot be read ({reason})") from None


def script_text(content: bytes) -> str:
    """The text of a script's file; BashError where it cannot be one."""
    if len(content) > MAX_BYTES:
        raise BashError(f"{len(content):,} bytes; a launch script has at most {MAX_BYTES:,}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BashError(
            f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None
    if "\0" in text:
        raise BashError("it has zero bytes: it is no text")
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise BashError("it is empty")
    first = text.split("\n", 1)[0]
    if first.startswith("#!") and not re.search(r"\b(ba|da|k|z)?sh\b", first):
        raise BashError(f"line 1: {first} starts no shell; expected a launch script in bash")
    return text


def closing(text: str, start: int, in_quotes: bool = False) -> int:
    """The position after what opens at ``start``: a quote, a bracket, ``$(`` or ``${``; BashError if it stays open."""
    opened = text[start]
    if opened == "$":
        if text[start + 1] == "'":
            found = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, start)
            return found.end() if found else _stays_open(text, start, "$'")
        return closing(text, start + 1, in_quotes)
    if opened == "'":
        end = text.find("'", start + 1)
        return end + 1 if end >= 0 else _stays_open(text, start, opened)
    position = start + 1
    while position < len(text):
        char, following = text[position], text[position + 1 : position + 2]
        if char == "\\":
            position += 2
        elif char == _ENDS[opened]:
            return position + 1
        elif opened == "(" and char == "#" and text[position - 1].isspace():
            position = (text.find("\n", position) + 1) or len(text)
        elif char == "$" and following and following in "({" and opened != "`":
            position = closing(text, position, in_quotes or opened == '"')
        elif char in (
            "`" if opened == '"' else '"`' if in_quotes and opened == "{" else "\"'`(" if opened == "(" else "\"'`"
        ):
            position = closing(text, position)
        else:
            position += 1
    return _stays_open(text, start, opened)


def _stays_open(text: str, start: int, what: str) -> int:
    line = text.count("\n", 0, start) + 1
    raise BashError(f"line {line}: {what} is opened and never closed; close it, or give the script that bash runs")


def statements(text: str, first_line: int = 1, is_flat: bool = False) -> Iterator[Statement]:
    """The statements of a script; ``is_flat``: every line is one, also inside of ``if``, ``case`` and the like."""
    masked, depths = _mask(text)
    start = 0
    for end in [*(found.end() for found in re.finditer("\n", masked)), len(text)]:
        depth = depths.get(end - 1, 0)
        is_over = is_flat or end == len(text) or (depth == 0 and not masked[start:end].rstrip().endswith(_LINE_GOES_ON))
        if is_over and end > start:
            yield Statement(text[start:end], masked[start:end], first_line + text.count("\n", 0, start))
            start = end


def _mask(text: str) -> tuple[str, dict[int, int]]:
    """The skeleton of a script, and for the position of each end of line how many compounds are open there."""
    masked: list[str] = []
    depths: dict[int, int] = {}
    open_words: list[str] = []
    here: list[tuple[bool, str]] = []
    word, is_command, in_test, position = "", True, False, 0

    def put(piece: str, end: int) -> None:
        nonlocal position
        masked.append(piece.ljust(end - position, piece[-1]))
        position = end

    while position < len(text):
        char, two = text[position], text[position : position + 2]
        is_expansion = two in ("$(", "${") or (two in ("$'", '$"')) or (two in ("<(", ">(") and not in_test)
        if char in "\"'`" or is_expansion or (two == "((" and not word) or (char == "(" and word.endswith("=")):
            put("_", closing(text, position + (two in ("<(", ">(", '$"'))))
            word += "_"
        elif char == "\\":
            put(" " if two == "\\\n" and not word else "_", min(position + 2, len(text)))
        elif char == "#" and not word:
            put(" ", (text.find("\n", position) + 1 or len(text) + 1) - 1)
        elif not in_test and two == "<<" and (text[position + 2 : position + 3] == "<" or _HERE.match(text, position)):
            if text[position + 2 : position + 3] == "<":
                put("  <", position + 3)
            elif found := _HERE.match(text, position):
                here.append((bool(found[1]), found[2].strip("\\'\"")))
                put(" ", found.end())
            word = ""
        elif char.isspace() or (char in ";&|()<>" and not in_test):
            if is_command:
                in_test = word == "[["
                if word == "time":  # which bashlex lacks
                    masked[-4:] = "    "
                if word in _OPENING:
                    open_words.append(word)
                elif word in _CLOSING and open_words:
                    open_words.pop()
            in_test = in_test and word != "]]"
            is_pattern = char == ")" and open_words[-1:] == ["case"]
            if word:
                is_command = is_command and word in _BEFORE_COMMAND
            is_command = is_command or char in "\n;&|()"
            if char == "(":
                open_words.append(char)
            elif char == ")" and open_words[-1:] == ["("]:
                open_words.pop()
            word = ""
            if is_pattern:
                _blank_pattern(masked)
                put(" ", position + 1)
            elif two == ";;":
                put("; ", position + 2)
            elif char == "\n":
                depths[position] = len(open_words) + in_test
                put("\n", position + 1)
                while here:
                    put(" ", _end_of_here(text, position, *here.pop(0)))
            else:
                put(" " if char == "\t" else char, position + 1)
        else:
            word += char
            hidden = (in_test and char in "&|()<>") or not (char.isascii() and char.isprintable())
            put("_" if hidden or word in ("[[", "]]") else char, position + 1)
            if word in ("[[", "]]"):
                masked[-2:] = ["_", "_"]
    return "".join(masked), depths


def _blank_pattern(masked: list[str]) -> None:
    """Blank the pattern of a branch of ``case``, which ends the skeleton so far."""
    for index in range(len(masked) - 1, -1, -1):
        if masked[index] in ("\n", ";", "; "):
            break
        masked[index] = " " * len(masked[index])


def _end_of_here(text: str, start: int, is_indented: bool, mark: str) -> int:
    """The position after a here-document whose first line is at ``start``; the end of the text if it has no end."""
    position = start
    while position < len(text):
        end = (text.find("\n", position) + 1) or len(text)
        line = text[position:end].rstrip("\n")
        if (line.lstrip("\t") if is_indented else line) == mark:
            return max(start, end - 1)
        position = end
    return len(text)
