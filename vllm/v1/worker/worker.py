"""One rank's device state: weights, KV cache and captured graphs, and the step that runs on them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch

from vllm.distributed.parallel_state import StepExchange
from vllm.model_executor.layers.fused_moe import read_choices
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.spec_decode.mtp_proposer import MtpProposer
from vllm.v1.worker.cache_memory import CacheMemory, copy_blocks
from vllm.v1.worker.decode_graphs import DecodeGraphs, Forward
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.weight_memory import WeightMemory


class Worker:
    """Composes what one rank has on its device, and executes steps."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self.config, self.parallel, self.platform, self.device = rank.config, rank.parallel, rank.platform, rank.device
        self.weights = WeightMemory(rank)
        self.model = self.weights.model
        rank.parallel.connect(rank.device)
        if rank.ops.connect_exchange is not None:
            rank.ops.connect_exchange(rank.config, rank.parallel.exchange)
        self.cache = CacheMemory(rank, self.model)
        self.graphs: DecodeGraphs | None = None
        if not rank.config.compilation.enforce_eager:
            self.graphs = self._new_graphs(self.model, self.model.compute_logits)
        config = rank.config
        self.batch = InputBatch(config.scheduler.max_num_seqs, config.model.max_model_len, config.cache.block_size)
        self.proposer: MtpProposer | None = None
        if self.model.mtp is not None:
            self.proposer = MtpProposer(rank, self.model, self.batch, self._new_graphs)
        self.runner = ModelRunner(rank, self.model, self.batch, self.graphs, self.proposer)

    def _new_graphs(
        self, forward: Forward, compute_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> DecodeGraphs:
        return DecodeGraphs(self._rank, forward, self.cache.num_blocks, self._freed_by_sleep, compute_logits)

    @property
    def all_graphs(self) -> list[DecodeGraphs]:
        """Those of the model and of its prediction layer; none without graphs."""
        found = (self.graphs, None if self.proposer is None else self.proposer.graphs)
        return [graphs for graphs in found if graphs is not None]

    def _freed_by_sleep(self) -> list[torch.Tensor]:
        return self.weights.tensors + self.cache.tensors

    def execute(self, step: SchedulerOutput, exchange: StepExchange) -> SamplerOutput:
        if step.block_copies:
            copy_blocks(self.cache.caches, step.block_copies)
        return self.runner.execute(step, exchange, self.cache.caches)

    @property
    def keeps_routed_experts(self) -> bool:
        return self.config.cache.enable_return_routed_experts

    def routed_experts(self, request: Request) -> np.ndarray:
        """[tokens computed, MoE layers, K] of a request that the last step finished."""
        batch = self.batch
        row = batch.row_of[request.request_id]
        # An end within accepted drafts leaves some behind it, and a last token was no input.
        num_tokens = min(int(batch.num_computed[row]), len(request.token_ids) - (request.finish_reason != "error"))
        blocks = batch.block_table[row, : -(-num_tokens // batch.block_size)]
        return read_choices(self.cache.caches[-1], blocks, num_tokens)

    def sleep(self, level: int, tags: Collection[str]) -> None:
        """Free what `tags` name; level 1 keeps a copy of the weights on the host, level 2 does not."""
        for graphs in self.all_graphs:
            graphs.sleep()
        if "weights" in tags:
            self.weights.free(keeps_copy=level == 1)
        if "kv_cache" in tags:
            self.cache.free()

    def shutdown(self) -> None:
        """Free everything; nothing can be called afterwards."""
        for graphs in self.all_graphs:
            graphs.drop()
        self.cache.caches = []
        self.sleep(2, ("weights", "kv_cache"))

    def memory_report(self) -> dict[str, int]:
        """Return the bytes of weights, offloaded weights, KV cache and communicators, and the block count."""
        memory = self.platform.memory(self.device)
        return {
            "weights_bytes": self.weights.num_bytes,
            "host_weights_bytes": self.weights.host_bytes,
            "kv_cache_bytes": self.cache.num_bytes,
            "communicator_bytes": sum(map(self.platform.group_buffer_bytes, self.parallel.used_groups())),
            "num_gpu_blocks": self.cache.num_blocks,
            "device_free_bytes": memory.free_bytes,
            "device_total_bytes": memory.total_bytes,
        }
