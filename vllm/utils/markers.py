"""Markers in a text that comes in pieces, cut anywhere."""

from __future__ import annotations


def num_begun(text: str, *markers: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of a marker; a whole one is none."""
    return max((n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n])), default=0)
