"""A value as the text of an override that gives it back unchanged, whatever characters it holds.

Hydra's grammar reads ``, = [ ] { } : $`` and spaces as syntax and knows no letters beyond ASCII; OmegaConf then reads
``${`` as an interpolation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"/[A-Za-z0-9_./@+-]*")  # paths that need no quotes, which keeps commands readable
_ENDS_IN_QUOTE = re.compile(r"(\\*)('|\Z)")  # Hydra reads a backslash as an escape only in front of a quote
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def override(key: str, value: object) -> str:
    """``key=value`` for Hydra; texts and paths come back equal, numbers and booleans as what they are."""
    return f"{key}={quoted(value)}"


def quoted(value: object) -> str:
    """The right side of ``override``."""
    if not isinstance(value, str | Path):
        return str(value)
    text = str(value)
    return text if _PLAIN.fullmatch(text) else in_quotes(literal(text))


def in_quotes(text: str) -> str:
    """A text between quotes, in which interpolations stay interpolations."""
    return "'" + _ENDS_IN_QUOTE.sub(lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"


def literal(value: Any) -> Any:
    """A tree of plain values in which OmegaConf finds no interpolation: reading it gives ``value`` again."""
    if isinstance(value, dict):
        return {key: literal(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [literal(entry) for entry in value]
    return _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", value) if isinstance(value, str) else value
