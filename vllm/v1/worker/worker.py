"""One rank's device state: weights, KV cache, and their life between training and generation."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_formats.cores import usable_cores
from hf_formats.finite import FiniteCheck
from hf_formats.fp8 import SCALE_SUFFIX
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import ParallelState, StepExchange
from vllm.model_executor.layers.fused_moe import bytes_per_token, new_choices_cache, read_choices
from vllm.model_executor.model_loader.checkpoint_reader import CheckpointReader, each_once, iterate_dummy
from vllm.model_executor.model_loader.collect_digests import collect_digests, shard_digests
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.fp8_weight_view import (
    Fp8Pairs,
    fp8_products_in_words,
    hold_in_fp8,
    weight_storage,
)
from vllm.model_executor.model_loader.shard_writer import ShardWriter, WeightUpdate
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache, RolloutOps
from vllm.platforms import Platform
from vllm.utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.worker.decode_graphs import DecodeGraphs, num_scratch_blocks
from vllm.v1.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Worker:
    """Builds the model, sizes the KV cache once, and frees and restores both on demand."""

    def __init__(
        self, config: VllmConfig, parallel: ParallelState, platform: Platform, ops: RolloutOps, device: torch.device
    ) -> None:
        # Torch takes as many threads as the process may use cores, but sees no container's limit of their time.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        self.config, self.platform, self.ops, self.device = config, platform, ops, device
        self.dtype = getattr(torch, config.model.dtype)
        self.parallel = parallel
        self.model = self._build_model(parallel)
        if config.model.quantization == "fp8":
            self.model.weight_views = hold_in_fp8(self.model.weight_views)
            logger.info("weights held in FP8: %s", fp8_products_in_words(self.model, ops))
        for tensor in weight_storage(self.model):
            platform.prefer_large_pages(tensor)
        self.names_to_load: set[str] = set(self.model.weight_views)
        self._fp8_pairs = Fp8Pairs()
        self._host_weights: list[Tensor] | None = None  # level-1 sleep keeps the weights here
        self._kept_weight_bytes = self._kept_kv_cache_bytes = 0  # while they sleep
        self.are_weights_awake = True
        self._load_initial_weights()
        self.kv_caches: list[KVCache] = []
        self.is_kv_cache_awake = False
        parallel.connect(device)
        if ops.connect_exchange is not None:
            ops.connect_exchange(config, parallel.exchange)
        self.num_gpu_blocks = 0  # the scheduler's, counted by the first wake_kv_cache
        self.wake_kv_cache()
        self.graphs: DecodeGraphs | None = None
        if not config.compilation.enforce_eager:
            self.graphs = DecodeGraphs(config, self.model, platform, device, self.num_gpu_blocks, self._freed_by_sleep)
        self.runner = ModelRunner(config, self.model, ops, self.graphs, device)

    def execute(self, step: SchedulerOutput, exchange: StepExchange) -> SamplerOutput:
        if step.block_copies:
            copy_blocks(self.kv_caches, step.block_copies)
        return self.runner.execute(step, exchange, self.kv_caches)

    @property
    def keeps_routed_experts(self) -> bool:
        return self.config.cache.enable_return_routed_experts

    def routed_experts(self, request_id: str) -> np.ndarray:
        """[tokens computed, MoE layers, K] of a request of the last step."""
        batch = self.runner.batch
        row = batch.row_of[request_id]
        num_tokens = int(batch.num_computed[row])
        blocks = batch.block_table[row, : -(-num_tokens // batch.block_size)]
        return read_choices(self.kv_caches[-1], blocks, num_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (hf_name, full tensor) pairs; RuntimeError while the weights sleep.

        When it raises, all weights count as not loaded: some are new by then and some are not. ValueError names those
        that hold NaN or infinity.
        """
        self._require_weights("load_weights")
        check = FiniteCheck()

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                check.add(name, tensor)
                yield name, tensor

        with self._all_or_nothing():
            loaded = self.model.load_weights(self._fp8_pairs.joined(checked()))
            check.require("the update")
        self.names_to_load -= loaded
        return loaded

    def start_weight_update(self) -> None:
        """Expect every weight, in any number of `load_weights`; until `check_weights_loaded` none counts as loaded."""
        self._require_weights("start_weight_update")
        self._count_none_as_loaded()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight, each once.

        ValueError for a name that is unknown, comes twice or is missing; the weights then count as not loaded.
        """
        self._require_weights("update_weights")
        self._count_none_as_loaded()
        with self._all_or_nothing():
            self.load_weights(each_once(weights))
            self.check_weights_loaded()

    def update_weight_shards(self, updates: Iterable[WeightUpdate]) -> dict[str, WeightDigest]:
        """Replace all shards of this rank, each element once; see `LLM.update_weight_shards`."""
        self._require_weights("update_weight_shards")
        self._count_none_as_loaded()
        writer = ShardWriter(self.model.weight_views)
        writer.write(updates)
        digests = writer.finish()
        self.model.renew_weight_copies(self.model.weight_views)
        self.names_to_load = set()
        return digests

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._count_none_as_loaded()
            raise

    def _count_none_as_loaded(self) -> None:
        self.names_to_load = set(self.model.weight_views)
        self._fp8_pairs = Fp8Pairs()

    def weights_digest(self) -> dict[str, WeightDigest]:
        self._require_weights("weights_digest")
        self.check_weights_loaded()
        return collect_digests(self.model.weight_views, self.parallel, self.dtype, self.device)

    def shard_digests(self) -> dict[str, WeightDigest]:
        self._require_weights("shard_digests")
        self.check_weights_loaded()
        return shard_digests(self.model.weight_views)

    def sleep(self, level: int, tags: Collection[str]) -> None:
        """Free what `tags` name; level 1 keeps a copy of the weights on the host, level 2 does not."""
        if self.graphs is not None:
            self.graphs.sleep()
        if "weights" in tags and self.are_weights_awake:
            self._free_weights(level)
        if "kv_cache" in tags:
            self._free_kv_cache()

    def shutdown(self) -> None:
        """Free everything; nothing can be called afterwards."""
        if self.graphs is not None:
            self.graphs.drop()
        self.kv_caches = []
        self.sleep(2, ("weights", "kv_cache"))

    def _freed_by_sleep(self) -> list[Tensor]:
        """The tensors that a step reads and whose memory `sleep` frees."""
        return [*weight_storage(self.model), *(tensor for cache in self.kv_caches for tensor in cache)]

    @property
    def _keeps_graphs(self) -> bool:
        return self.graphs is not None and self.platform.keeps_graphs_over_sleep

    def _free_kv_cache(self) -> None:
        if self.is_kv_cache_awake and self._keeps_graphs:  # their updates go on referring to these tensors
            caches = [tensor for cache in self.kv_caches for tensor in cache]
            self._kept_kv_cache_bytes = sum(self.platform.free(tensor, keeps_address=True) for tensor in caches)
        elif not self._keeps_graphs:
            self.kv_caches, self._kept_kv_cache_bytes = [], 0
        self.is_kv_cache_awake = False

    def _free_weights(self, level: int) -> None:
        self._host_weights = [] if level == 1 else None
        self._kept_weight_bytes = 0
        if level == 2:
            self._count_none_as_loaded()
        # NPU-ADAPTATION(sleep-frees-storage): freed by hand, tensor by tensor: the memory pool that sleeps as a whole
        # keeps device memory on runs over several nodes; drop when that pool gives all of its memory back there.
        for tensor in weight_storage(self.model):
            if self._host_weights is not None:
                self._host_weights.append(tensor.to("cpu", copy=True))
            self._kept_weight_bytes += self.platform.free(tensor, keeps_address=self._keeps_graphs)
        # NPU-ADAPTATION END
        self.are_weights_awake = False

    def wake_weights(self) -> None:
        """Allocate the weights again: restored from the host after level 1, else uninitialised until load_weights."""
        if self.are_weights_awake:
            return
        host_weights = iter(self._host_weights or [])
        for tensor in weight_storage(self.model):
            self.platform.allocate(tensor, zeroed=False)
            self.platform.prefer_large_pages(tensor)
            if self._host_weights is not None:
                tensor.copy_(next(host_weights))
        self._host_weights = None
        self.are_weights_awake = True

    def wake_kv_cache(self) -> None:
        """Allocate the caches of all layers, always with the block count that was determined at start."""
        if self.is_kv_cache_awake:
            return
        if not self.num_gpu_blocks:  # counted once: the scheduler's blocks must exist whatever is free after a sleep
            self.num_gpu_blocks = self._count_blocks()
        for tensor in (tensor for held in self.kv_caches for tensor in held):
            self.platform.allocate(tensor, zeroed=True)
        self.kv_caches = self.kv_caches or self._new_kv_caches()
        self.is_kv_cache_awake = True

    def _new_kv_caches(self) -> list[KVCache]:
        hf, cache = self.config.model.hf, self.config.cache
        num_blocks = self.num_gpu_blocks + num_scratch_blocks(self.config)
        caches = [
            self.model.new_kv_cache(num_blocks, cache.block_size, self.dtype, self.device, cache.kv_cache_layout)
            for _ in range(hf.num_hidden_layers)
        ]
        if cache.enable_return_routed_experts:
            caches.append(new_choices_cache(hf, num_blocks, cache.block_size, self.device))
        return caches

    def memory_report(self) -> dict[str, int]:
        """Return the bytes of weights, offloaded weights, KV cache and communicators, and the block count."""
        weights, kv_cache = self._kept_weight_bytes, self._kept_kv_cache_bytes
        if self.are_weights_awake:
            weights = sum(tensor.untyped_storage().nbytes() for tensor in weight_storage(self.model))
        if self.is_kv_cache_awake:
            kv_cache = sum(t.untyped_storage().nbytes() for cache in self.kv_caches for t in cache)
        memory = self.platform.memory(self.device)
        buffers = sum(self.platform.group_buffer_bytes(name) for name in self.parallel.used_groups())
        return {
            "weights_bytes": weights,
            "host_weights_bytes": sum(t.nbytes for t in self._host_weights or []),
            "kv_cache_bytes": kv_cache,
            "communicator_bytes": buffers,
            "num_gpu_blocks": self.num_gpu_blocks,
            "device_free_bytes": memory.free_bytes,
            "device_total_bytes": memory.total_bytes,
        }

    def _require_weights(self, action: str) -> None:
        if not self.are_weights_awake:
            raise RuntimeError(f'{action} while the weights sleep: call wake_up(tags=["weights"]) first')

    def _build_model(self, parallel: ParallelState) -> CausalLM:
        ops = self.ops
        if self.config.model.quantization == "fp8":  # FP8 blocks replace the tensors of the weights
            ops = replace(ops, new_weight=partial(ops.new_weight, may_pack=False))
            if ops.multiplies_fp8:  # the one weight that decode steps would dequantise: see MultiHeadLatentAttention
                ops = replace(ops, copies_strided_weights=True)
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                hf = self.config.model.hf
                return CausalLM(hf, self.config.model.max_model_len, parallel, ops, self.device)
        finally:
            torch.set_default_dtype(default_dtype)

    def _load_initial_weights(self) -> None:
        views = self.model.weight_views
        if not self.platform.holds_values:
            self.names_to_load = set()
            return
        if self.config.load_format == "dummy":
            self.model.load_weights(iterate_dummy(views, self.config.model.seed))
            self.names_to_load = set()  # what belongs to other ranks only is not even made
            return

        def is_wanted(name: str) -> bool:
            return name not in views or views[name].parameter is not None

        reader = CheckpointReader(self.config.model.model, self.config.model.hf.tie_word_embeddings)
        try:
            self.names_to_load -= self.model.load_weights(reader.weights(is_wanted))
        finally:
            reader.close()
        self.names_to_load -= {name for name, view in views.items() if view.parameter is None}
        self.check_weights_loaded()
        logger.info("read %.3f GB of %s", reader.bytes_read / 1e9, self.config.model.model)

    def check_weights_loaded(self) -> None:
        """Raise ValueError for weights that were not loaded since the model was built, since a level-2 sleep, or since
        the start of an update.
        """
        unpaired = sorted(self._fp8_pairs.unpaired)
        if unpaired:
            raise ValueError(
                f"{len(unpaired)} FP8 weights came without their scales ({SCALE_SUFFIX}), or scales without their "
                f"weights: {', '.join(unpaired[:20])}"
            )
        if self.names_to_load:
            missing = sorted(self.names_to_load)
            shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
            raise ValueError(f"{len(missing)} weights were not loaded: {shown}")

    def _count_blocks(self) -> int:
        cache, model = self.config.cache, self.config.model
        if cache.num_gpu_blocks_override is not None:
            return cache.num_gpu_blocks_override
        hf, scheduler = model.hf, self.config.scheduler
        values = hf.kv_values_per_token(self.config.parallel.tensor_parallel_size)
        token_bytes = values * self.dtype.itemsize * hf.num_hidden_layers
        if cache.enable_return_routed_experts:
            token_bytes += bytes_per_token(hf)
        budget_bytes = self.platform.kv_cache_budget_bytes(self.device, cache.gpu_memory_utilization)
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
        mine = torch.tensor([count], dtype=torch.int64, device=self.platform.exchange_device(self.device))
        return int(self.parallel.tp.all_gather(mine).min())


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
