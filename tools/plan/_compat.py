"""What plans need of torch that its versions do differently."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def fake_process_group(rank: int, size: int) -> Any:
    """A group whose collectives move nothing; torch 2.5 has a constructor for it."""
    from torch._C._distributed_c10d import FakeProcessGroup

    return getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(rank, size)


def let_recompute_run_on_meta() -> None:
    """Give torch 2.5 the module of the meta device for which its recompute asks, and which it then does not use."""
    if torch.__version__ < "2.6" and not hasattr(torch, "meta"):
        torch._register_device_module("meta", ModuleType("torch.meta"))
