"""The bar of finished prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def progress(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Any]:
    """A bar of `total` prompts, or None; tqdm's own is there on terminals only."""
    if not use_tqdm:
        yield None
        return
    from tqdm.auto import tqdm  # an engine that shows no bar does without

    make = partial(tqdm, disable=None) if use_tqdm is True else use_tqdm
    bar = make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
    try:
        yield bar
    finally:
        bar.close()
