"""Turns off the side effects of a forward while it runs again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from megatron.core.transformer.moe.router import TopKRouter


@contextmanager
def without_counting(module: nn.Module) -> Iterator[None]:
    """Routers inside ``module`` do not count the tokens that they route again."""
    routers = [part for part in module.modules() if isinstance(part, TopKRouter)]
    for router in routers:
        router.is_counting = False
    try:
        yield
    finally:
        for router in routers:
            router.is_counting = True
