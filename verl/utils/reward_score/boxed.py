r"""The last ``\boxed{...}`` of a text."""

from __future__ import annotations

_PREFIX = "\\boxed{"


def last_boxed(text: str, prefixes: tuple[str, ...] = (_PREFIX,)) -> str | None:
    """From the last of the ``prefixes`` to the brace that closes it; None where there is none or it is not closed."""
    start = max(text.rfind(prefix) for prefix in prefixes)
    if start < 0:
        return None
    depth = 0
    for end in range(text.index("{", start), len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start : end + 1]
    return None


def inside_boxed(text: str) -> str:
    r"""What ``\boxed{...}`` encloses, of a text that is nothing else; ValueError for another text."""
    if not (text.startswith(_PREFIX) and text.endswith("}")):
        raise ValueError(f"{text!r} is not of the form \\boxed{{...}}")
    return text[len(_PREFIX) : -1]
