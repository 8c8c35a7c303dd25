"""The contract of a rollout engine inside a worker, and the table of those there are."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch

from verl.protocol import DataProto
from verl.workers.config import RolloutConfig
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.rank_shards import RankShards
from vllm.model_executor.model_loader.shard_writer import ShardWriter
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform

_ROLLOUT_REGISTRY = {
    ("vllm", "sync"): "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd:vLLMRollout",
}


class BaseRollout(ABC):
    """Generates with weights that the trainer streams in; holds device memory only between resume and release."""

    @abstractmethod
    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        rollout_ops: str | RolloutOps,
        device: torch.device | Platform,
        first_rank: int = 0,
    ) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str]) -> None:
        """Allocates ``weights`` (empty, to be written by ``update_weight_shards``) and/or ``kv_cache``."""

    @abstractmethod
    def rank_shards(self, rank: int) -> RankShards:
        """HF name -> what the engine of ``rank`` owns of it; every rank knows that of all ranks."""

    @abstractmethod
    def update_weight_shards(self, version: int) -> AbstractContextManager[ShardWriter]:
        """The context in which all shards of this rank are written for policy ``version``. Elements that this rank does
        not own, that come twice or not at all are an error. Afterwards the writer's ``digests`` are what
        ``shard_digests`` would return; each was taken from the memory of the shard when all of it was written.
        """

    @abstractmethod
    def shard_digests(self) -> dict[str, WeightDigest]:
        """HF name -> digest of this rank's shard as it is in memory now."""

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
