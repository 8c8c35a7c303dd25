"""What both sides of a child process that speaks in JSON lines share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

_ROOT = Path(__file__).resolve().parents[2]


def child_environment() -> dict[str, str]:
    """The variables of a child that runs a module of this repository, with one thread for numbers and texts."""
    search_path = filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])
    own = {"PYTHONPATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own}


def claim_stdout() -> TextIO:
    """The child's reply stream; whatever else is printed goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def send(stream: TextIO, message: dict[str, Any]) -> None:
    """Write one reply."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()
