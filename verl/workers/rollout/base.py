"""The contract of a rollout engine inside a worker, and the table of those there are."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.config import RolloutConfig
from vllm.model_executor.model_loader.digest import WeightDigest

_ROLLOUT_REGISTRY = {
    ("vllm", "sync"): "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout",
}


class BaseRollout(ABC):
    """Generates with weights that the trainer streams in; holds device memory only between resume and release."""

    @abstractmethod
    def __init__(self, config: RolloutConfig, model_path: str, *, rollout_ops: str, device: torch.device) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str]) -> None:
        """Allocates ``weights`` (empty, to be written by ``update_weights``) and/or ``kv_cache``."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Writes every weight of policy ``version`` from ``(hf_name, tensor)`` pairs; collective over the ranks of the
        stream. An unknown, repeated or missing name is an error.
        """

    @abstractmethod
    def weights_digest(self) -> dict[str, WeightDigest]:
        """HF name -> digest of each whole weight as the engine holds it; collective over the engine's ranks."""

    @abstractmethod
    def release(self) -> None:
        """Frees the KV cache and the weights."""

    @abstractmethod
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses, masks and log-probabilities for every row of ``prompts``."""


def get_rollout_class(rollout_name: str, mode: str) -> type[BaseRollout]:
    """The class registered for ``(rollout_name, mode)``; ValueError names the known pairs otherwise."""
    path = _ROLLOUT_REGISTRY.get((rollout_name, mode))
    if path is None:
        known = ", ".join(f"{name}/{kind}" for name, kind in _ROLLOUT_REGISTRY)
        raise ValueError(f"actor_rollout_ref.rollout: no engine {rollout_name!r} in mode {mode!r}; known: {known}")
    module_name, class_name = path.split(":")
    return getattr(importlib.import_module(module_name), class_name)
