"""The paged KV caches of one rank: counted once, and their memory while training has the device."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from vllm.model_executor.layers.fused_moe import bytes_per_token, new_choices_cache
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache
from vllm.utils import async_tensor_h2d
from vllm.v1.worker.decode_graphs import num_scratch_blocks
from vllm.v1.worker.rank_context import RankContext

logger = logging.getLogger(__name__)


class CacheMemory:
    """The caches of all layers, in one of two states: allocated or freed.

    Attributes:
        caches: one of each layer, the prediction layer's behind them, and one more for choices of experts where those
            are kept. While freed, there are none; with `keeps_address` the same tensors without memory, which updates
            of captured graphs refer to.
        num_blocks: the scheduler's, which must exist whatever is free after a sleep: they are counted once.
    """

    def __init__(self, rank: RankContext, model: CausalLM) -> None:
        self._config, self._model, self._parallel = rank.config, model, rank.parallel
        self._platform, self._device, self._keeps_address = rank.platform, rank.device, rank.keeps_address
        self._dtype: torch.dtype = getattr(torch, rank.config.model.dtype)
        self.caches: list[KVCache] = []
        self.num_blocks = self._count_blocks()
        self.is_allocated = False
        self._kept_bytes = 0  # on the device while freed
        self.allocate()

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for cache in self.caches for tensor in cache]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now."""
        if not self.is_allocated:
            return self._kept_bytes
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def free(self) -> None:
        """Give the memory back."""
        if not self._keeps_address:
            self.caches = []
        elif self.is_allocated:
            self._kept_bytes = sum(self._platform.free(tensor, keeps_address=True) for tensor in self.tensors)
        self.is_allocated = False

    def allocate(self) -> None:
        """Take the memory again, zeroed, for as many blocks as ever."""
        if self.is_allocated:
            return
        for tensor in self.tensors:
            self._platform.allocate(tensor, zeroed=True)
        self.caches = self.caches or self._new_caches()
        self.is_allocated = True

    def _new_caches(self) -> list[KVCache]:
        hf, cache = self._config.model.hf, self._config.cache
        num_blocks = self.num_blocks + num_scratch_blocks(self._config)
        caches = [
            self._model.new_kv_cache(num_blocks, cache.block_size, self._dtype, self._device, cache.kv_cache_layout)
            for _ in range(self._model.num_caches)
        ]
        if cache.enable_return_routed_experts:
            caches.append(new_choices_cache(hf, num_blocks, cache.block_size, self._device))
        return caches

    def _count_blocks(self) -> int:
        cache, model = self._config.cache, self._config.model
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        hf, scheduler = model.hf, self._config.scheduler
        values = hf.kv_values_per_token(self._config.parallel.tensor_parallel_size)
        token_bytes = values * self._dtype.itemsize * self._model.num_caches
        if cache.enable_return_routed_experts:
            token_bytes += bytes_per_token(hf)
        budget_bytes = self._platform.kv_cache_budget_bytes(self._device, cache.gpu_memory_utilization)
        affordable = self._least_of_replica(budget_bytes // (token_bytes * cache.block_size))
        blocks_per_seq = -(-model.max_model_len // cache.block_size)
        if affordable < blocks_per_seq:
            raise ValueError(
                f"gpu_memory_utilization={cache.gpu_memory_utilization} leaves room for {affordable} KV blocks, "
                f"but one sequence of max_model_len={model.max_model_len} needs {blocks_per_seq}; raise it or lower "
                "max_model_len"
            )
        blocks = min(affordable, scheduler.max_num_seqs * blocks_per_seq)
        logger.info("KV cache: %d blocks of %d tokens (%d affordable)", blocks, cache.block_size, affordable)
        return blocks

    def _least_of_replica(self, count: int) -> int:
        """Return the smallest count of the replica: its ranks schedule alike only with equal caches."""
        mine = torch.tensor([count], dtype=torch.int64, device=self._platform.exchange_device(self._device))
        return int(self._parallel.tp.all_gather(mine).min())


@torch.inference_mode()
def zero_blocks(caches: list[KVCache], blocks: list[int]) -> None:
    """Write zeros to KV blocks in all layers: NaN would reach the next owner even at the positions that are masked."""
    for pages in (tensor for cache in caches for tensor in cache):
        pages.index_fill_(0, async_tensor_h2d(np.array(blocks, dtype=np.int64), pages.device), 0)


@torch.inference_mode()
def copy_blocks(caches: list[KVCache], pairs: list[tuple[int, int]]) -> None:
    """Copy KV blocks, (source, target) pairs, in all layers: every source is read before any target is written."""
    tensors = [tensor for cache in caches for tensor in cache]
    sources, targets = async_tensor_h2d(np.array(pairs, dtype=np.int64), tensors[0].device).unbind(1)
    for pages in tensors:
        pages.index_copy_(0, targets, pages.index_select(0, sources))
