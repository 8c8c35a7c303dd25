"""What trainer and workers share, and upstream's short names for it: ``from verl.utils import hf_tokenizer``."""

from __future__ import annotations

import importlib
from typing import Any

_FROM = {"as_torch_index": "groupwise", "group_mean_std": "groupwise", "hf_tokenizer": "tokenizer"}

__all__ = list(_FROM)


def __getattr__(name: str) -> Any:
    """Looked up when it is asked for, so that importing a module of this package imports no other one."""
    if name not in _FROM:
        raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verl.utils.{_FROM[name]}"), name)
