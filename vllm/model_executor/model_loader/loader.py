"""Streams of (hf_name, tensor) pairs: checked for duplicates, or random."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm.model_executor.model_loader.weight_view import WeightView

DUMMY_STD = 0.02


def each_once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `weights` on; ValueError for a name that comes a second time."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"weight {name} came twice in one update")
        seen.add(name)
        yield name, tensor


def iterate_dummy(views: dict[str, WeightView], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Values for every tensor that this rank owns: norms 1, biases 0, others normal and drawn per name, so that every
    layout gets the same model.
    """
    for name, view in views.items():
        if len(view.hf_shape) == 1:
            yield name, torch.ones(view.hf_shape) if name.endswith("norm.weight") else torch.zeros(view.hf_shape)
            continue
        if view.parameter is None:
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        yield name, torch.randn(view.hf_shape, generator=generator) * DUMMY_STD
