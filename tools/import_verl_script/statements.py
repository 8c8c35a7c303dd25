"""A bash script as statements that bashlex can parse.

bashlex knows neither arrays, arithmetic, ``[[ ]]`` nor ``case``. It gets a skeleton of the script, of the same length,
in which quotes, expansions, arrays, comments and here-documents are blanked out: positions are the script's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 256 * 1024
# What opens -> what closes it, and what opens within it.
_PAIRS = {"'": ("'", ""), '"': ('"', "`"), "`": ("`", ""), "(": (")", "\"'`("), "{": ("}", "\"'`")}
_OPENING, _CLOSING = {"if", "for", "while", "until", "select"}, {"fi", "done", "}"}
_BEFORE_COMMAND = {"then", "do", "else", "elif", "if", "while", "until", "{", "!"}
_TOKEN = re.compile(r"[^\s;&|()<>]+|[;&|()\n]")
_HERE = re.compile(r"(?<!<)<<-?[ \t]*\\?([\w.]+|'[^'\n]*'|\"[^\"\n]*\")")
_LINE_GOES_ON = ("|", "&&", "()")
# What bashlex lacks -> what stands in its place: a word, or nothing.
_LACKING = {
    r"\[\[\s.{,2000}?\s\]\]": "_",
    r"\bcase\s+\S+\s+in\s.{,8000}?\besac\b": "_",
    r"^[ \t]*time(?=\s)|\t": " ",
    r"[^\n -~]": "_",
}


class BashError(ValueError):
    """The text is no bash, or cannot be read."""


def parsed(skeleton: str) -> list[Any] | None:
    """bashlex's nodes of a statement, None where it cannot parse it; BashError where there is no bashlex."""
    try:
        import bashlex
    except ImportError:
        reason = "pip install bashlex==0.18; it is GPL-3.0, and only this command uses it"
        raise BashError(f"bashlex is needed to read it: {reason}") from None
    try:
        return list(bashlex.parse(skeleton.rstrip())) if skeleton.strip() else []
    except (bashlex.errors.ParsingError, NotImplementedError, AttributeError, IndexError, AssertionError):
        return None


def script_text(content: bytes) -> str:
    """The text of a script's file; BashError where it cannot be one."""
    if len(content) > MAX_BYTES:
        raise BashError(f"{len(content):,} bytes; a launch script has at most {MAX_BYTES:,}")
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BashError(f"line {line}: byte 0x{content[error.start]:02x} is not UTF-8") from None
    if not text.strip() or "\0" in text:
        raise BashError("it has zero bytes: it is no text" if text.strip() else "it is empty")
    first = text.split("\n", 1)[0]
    if first.startswith("#!") and not re.search(r"\b(ba|da|k|z)?sh\b", first):
        raise BashError(f"line 1: {first} starts no shell; expected a launch script in bash")
    return text


def closing(text: str, start: int) -> int:
    """The position after what opens at ``start``: a quote, a bracket, ``$(`` or ``${``; BashError if it stays open."""
    start += text[start] in "$<>"
    end, nested = _PAIRS[text[start]]
    position = start + 1
    while position < len(text):
        char = text[position]
        if char == end:
            return position + 1
        if char == "\\" and end != "'":
            position += 2
        elif end == ")" and char == "#" and text[position - 1].isspace():
            position = (text.find("\n", position) + 1) or len(text)
        elif char in nested or (char == "$" and nested and text[position + 1 : position + 2] in ("(", "{")):
            position = closing(text, position)
        else:
            position += 1
    line = text.count("\n", 0, start) + 1
    raise BashError(f"line {line}: {text[start]} is opened and never closed")


def statements(text: str) -> Iterator[tuple[int, str, str]]:
    """(first line, text, skeleton) of the pieces of a script between ends of lines at which nothing is open."""
    skeleton = _skeleton(text) + "\n"
    for form, fill in _LACKING.items():
        pattern = re.compile(form, re.DOTALL | re.MULTILINE)
        skeleton = pattern.sub(lambda found, fill=fill: fill * len(found[0]), skeleton)  # type: ignore[misc]
    opened: list[str] = []
    start, line, is_command = 0, 1, True
    for found in _TOKEN.finditer(skeleton):
        token, end = found[0], found.end()
        if token in ("(", "{") or (is_command and token in _OPENING):
            opened.append(token)
        elif opened and (token == ")" if opened[-1] == "(" else is_command and token in _CLOSING):
            opened.pop()
        is_command = token in ";&|()\n" or (is_command and token in _BEFORE_COMMAND)
        is_last = end == len(skeleton)
        if is_last or (token == "\n" and not opened and not skeleton[start:end].rstrip().endswith(_LINE_GOES_ON)):
            yield line, text[start:end], skeleton[start:end]
            line += text.count("\n", start, end)
            start = end


def _skeleton(text: str) -> str:
    masked: list[str] = []
    marks: list[str] = []  # of the here-documents that begin after this line
    position, before = 0, "\n"
    while position < len(text):
        char, two = text[position], text[position : position + 2]
        is_start, end, fill = before in " \t\n;&|()", position + 1, char
        is_array = (char == "(" and before == "=") or (two == "((" and is_start)
        if is_array or char in "\"'`" or two in ("$(", "${", "$'", '$"', "<(", ">("):
            end, fill = closing(text, position), "_"
        elif char == "\\":
            end, fill = min(position + 2, len(text)), " " if two == "\\\n" and is_start else "_"
        elif char == "#" and is_start:
            end, fill = (text.find("\n", position) + 1 or len(text) + 1) - 1, " "
        elif found := _HERE.match(text, position):
            marks.append(found[1].strip("'\""))
            end, fill = found.end(), " "
        elif char == "\n" and marks:
            last = re.compile(rf"^\t*{re.escape(marks.pop(0))}$", re.MULTILINE).search(text, end)
            end = last.end() if last else len(text)
        masked.append(fill.ljust(end - position, " " if fill == "\n" else fill))
        position, before = end, fill
    return "".join(masked)
