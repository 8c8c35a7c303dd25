"""Random weights that do not depend on the layout: every whole tensor is drawn from a generator of its own name."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class WeightInit:
    """Draws whole tensors of normal(0, ``std``) in float32 on the host; a rank then takes its slice."""

    def __init__(self, seed: int, std: float) -> None:
        self.seed = seed
        self.std = std

    def normal(self, name: str, *shape: int) -> Tensor:
        """The tensor called ``name`` (a global name: global layer and expert numbers), the same on every rank."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").mul_(self.std)


def init_weights(module: nn.Module, init: WeightInit, name: str) -> None:
    """Fill ``module`` from the tensors under ``name``: by an ``init_weights`` of its own, else child by child."""
    own = getattr(module, "init_weights", None)
    if own is not None:
        own(init, name)
        return
    for child_name, child in module.named_children():
        init_weights(child, init, f"{name}.{child_name}")


def rank_slice(full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Part ``rank`` of ``size`` equal parts of ``full`` along ``dim``."""
    return full.chunk(size, dim=dim)[rank] if size > 1 else full
