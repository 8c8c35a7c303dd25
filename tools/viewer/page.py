"""The page: one HTML file that needs nothing beside it and runs no other script than its own.

Records lie in it as data with every ``<``, ``>`` and ``&`` escaped, the script puts them on the page as text nodes
only, and the page's content security policy lets only that very script run (by its SHA-256) and loads nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

_HERE = Path(__file__).parent
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def render(name: str, records: Sequence[dict[str, Any]]) -> str:
    """The whole page of a run called ``name``."""
    template, script, style = ((_HERE / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("html", "js", "css"))
    return Template(template).substitute(
        title=f"{html.escape(name)}: samples",
        policy=f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'",
        style=style,
        script=script,
        records=json.dumps(list(records), separators=(",", ":")).translate(_ESCAPES),
    )


def _source(text: str) -> str:
    """How a content security policy names a script or style by its bytes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"
