"""Streams of (hf_name, tensor) pairs: checked on their way, or made up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm.model_executor.model_loader.weight_target import WeightTarget

DUMMY_STD = 0.02


def each_once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`weights`; ValueError for a name that comes a second time."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"weight {name} came twice in one update")
        seen.add(name)
        yield name, tensor


def iterate_dummy(targets: dict[str, WeightTarget], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random values for every tensor, drawn per name, so that every layout gets the same model: norms 1, biases 0,
    else normal.
    """
    for name, target in targets.items():
        if len(target.hf_shape) == 1:
            yield name, torch.ones(target.hf_shape) if name.endswith("norm.weight") else torch.zeros(target.hf_shape)
            continue
        if target.parameter is None:
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        yield name, torch.randn(target.hf_shape, generator=generator) * DUMMY_STD
