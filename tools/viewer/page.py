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
from typing import Any

_HERE = Path(__file__).parent
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})

_CONTROLS = """
<label>step <select id="step"></select></label>
<label>source <select id="source"></select></label>
<label>group <input id="group" size="8" placeholder="all"></label>
<label>reward <input id="reward_min" size="4" placeholder="min"> to <input id="reward_max" size="4" placeholder="max">
</label>
<label>length <input id="length_min" size="4" placeholder="min"> to <input id="length_max" size="4" placeholder="max">
</label>
<label>version <input id="version_min" size="4" placeholder="min"> to <input id="version_max" size="4"
 placeholder="max"></label>
<label>text <input id="text" size="12" placeholder="contains"></label>
<label>sort <select id="sort">
<option value="none">as recorded</option><option value="reward">reward</option><option value="length">length</option>
<option value="gap">largest difference</option></select></label>
<label>colour <select id="colour">
<option value="difference">training - rollout</option><option value="log_probs">training log-prob</option>
<option value="rollout_log_probs">rollout log-prob</option><option value="none">none</option></select></label>
<button id="clear" type="button">clear</button>
"""


def render(name: str, records: Sequence[dict[str, Any]]) -> str:
    """The whole page of a run called ``name``."""
    script = (_HERE / "viewer.js").read_text(encoding="utf-8")
    style = (_HERE / "viewer.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'"
    content = json.dumps(list(records), separators=(",", ":")).translate(_ESCAPES)
    title = f"{html.escape(name)}: samples"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head><body>"
        f'<header><h1>{title}</h1><form id="filters">{_CONTROLS}</form></header>'
        '<main><div class="list"><div id="count"></div><table><thead><tr><th>step</th><th>group</th><th>reward</th>'
        '<th>length</th><th>version</th><th>difference</th></tr></thead><tbody id="rows"></tbody></table>'
        '<button id="more" type="button">more</button></div>'
        '<section id="sample"></section></main>'
        f'<script type="application/json" id="records">{content}</script><script>{script}</script></body></html>\n'
    )


def _source(text: str) -> str:
    """How a content security policy names a script or style by its bytes."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"
