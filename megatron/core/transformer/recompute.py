"""What a forward that runs again in backward must not do a second time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron.core.transformer.moe.router import TopKRouter


@contextmanager
def without_counting(module: nn.Module) -> Iterator[None]:
    """Routers inside ``module`` route the same tokens again: they must not be counted twice."""
    routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
    for router in routers:
        router.is_counting = False
    try:
        yield
    finally:
        for router in routers:
            router.is_counting = True
