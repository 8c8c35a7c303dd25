"""The states of all random generators of a process as plain tensors, so that they need no pickle on disk."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def get_random_states(device: torch.device) -> dict[str, Tensor]:
    """States of python's, numpy's and torch's global generators, and of ``device``'s when it has one of its own."""
    version, words, next_gauss = random.getstate()
    assert version == 3, f"python's random state has version {version}"
    _, keys, position, has_gauss, cached_gauss = cast(tuple[str, Any, int, int, float], np.random.get_state())
    states = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([next_gauss is not None, next_gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Continue all generators from what ``get_random_states`` returned."""
    has_gauss, gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    *keys, position, numpy_has_gauss = states["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, numpy_has_gauss, states["numpy_gauss"].item())
    )
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


def seed_from_states(states: Mapping[str, Tensor], rank: int) -> None:
    """Seed all generators of this process from saved states and ``rank``: SHA-256 of both; every rank gets its own."""
    digest = hashlib.sha256(b"".join(states[name].numpy().tobytes() for name in sorted(states)))
    digest.update(rank.to_bytes(8, "big"))
    seed = int.from_bytes(digest.digest()[:8], "big")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed >> 1)
