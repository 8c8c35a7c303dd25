"""EngineArgs: what a caller may say, turned into a checked configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from vllm.config import (
    LOGPROBS_MODES,
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    default_capture_sizes,
)
from vllm.transformers_utils.config import load_config
from vllm.transformers_utils.quantization import resolve_quantization


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine under vLLM's names. None means: derived from the model, the environment or the device."""

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    seed: int = 0
    tensor_parallel_size: int = 1
    data_parallel_size: int | None = None  # None: environment VLLM_DP_SIZE, else 1
    enable_expert_parallel: bool = False
    rebalance_interval: int = 0  # steps between two rounds of moving requests between DP replicas; 0: never
    distributed_executor_backend: str = "external_launcher"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_cache_layout: str = "nd"
    enable_return_routed_experts: bool = False  # CompletionOutput.routed_experts, for replay in training
    expert_exchange: str = "all_gather"
    force_load_balancing: bool = False  # every expert gets as many tokens, whatever the router says; for benchmarks
    enable_sleep_mode: bool = True
    enforce_eager: bool = True
    cudagraph_capture_sizes: Sequence[int] | None = None  # None: powers of two up to max_num_seqs
    load_format: str = "auto"
    quantization: str | None = None  # fp8, dequantize; None: as the checkpoint stores its weights
    rollout_ops: str | None = None  # None: the table of the platform
    device: str | None = None
    logprobs_mode: str = LOGPROBS_MODES[0]

    def create_engine_config(self, rank: int, world_size: int, first_rank: int = 0) -> VllmConfig:
        """The configuration of one process; ValueError listing every problem.

        `rank` and `world_size` are those of the engine, whose ranks are torch.distributed's from `first_rank` on.
        """
        hf = load_config(self.model)
        max_model_len = hf.max_position_embeddings if self.max_model_len is None else self.max_model_len
        problems, dp_size = self._data_parallel_size()
        found, quantization = resolve_quantization(self.model, self.quantization)
        problems += found
        batched_tokens = self.max_num_batched_tokens
        if batched_tokens is None:
            batched_tokens = max(2048, self.max_num_seqs, 0 if self.enable_chunked_prefill else max_model_len)
        config = VllmConfig(
            model=ModelConfig(
                model=self.model,
                tokenizer=self.tokenizer or self.model,
                skip_tokenizer_init=self.skip_tokenizer_init,
                dtype=hf.dtype if self.dtype == "auto" else self.dtype,
                seed=self.seed,
                max_model_len=max_model_len,
                hf=hf,
                quantization=quantization,
            ),
            cache=CacheConfig(
                self.block_size,
                self.gpu_memory_utilization,
                self.num_gpu_blocks_override,
                self.enable_prefix_caching,
                self.kv_cache_layout,
                self.enable_return_routed_experts,
            ),
            scheduler=SchedulerConfig(self.max_num_seqs, batched_tokens, self.enable_chunked_prefill),
            compilation=CompilationConfig(self.enforce_eager, self._capture_sizes()),
            parallel=ParallelConfig(
                self.tensor_parallel_size,
                dp_size,
                self.enable_expert_parallel,
                rank,
                world_size,
                self.rebalance_interval,
                self.expert_exchange,
                self.force_load_balancing,
                first_rank,
            ),
            load_format=self.load_format,
            rollout_ops=self.rollout_ops,
            device=self.device,
            enable_sleep_mode=self.enable_sleep_mode,
            logprobs_mode=self.logprobs_mode,
        )
        if self.distributed_executor_backend != "external_launcher":
            problems.append(
                f"distributed_executor_backend={self.distributed_executor_backend!r}: only 'external_launcher' is "
                "supported; start one process per device (torchrun, Ray) and build an LLM in each"
            )
        problems += config.problems()
        if problems:
            raise ValueError("the engine cannot be built:\n" + "\n".join(f"  - {p}" for p in problems))
        return config

    def _capture_sizes(self) -> tuple[int, ...]:
        if self.cudagraph_capture_sizes is None:
            return default_capture_sizes(self.max_num_seqs)
        return tuple(sorted(set(self.cudagraph_capture_sizes)))

    def _data_parallel_size(self) -> tuple[list[str], int]:
        """(problems, size), from the argument or else the environment."""
        if self.data_parallel_size is not None:
            return [], self.data_parallel_size
        text = os.environ.get("VLLM_DP_SIZE", "1")
        if not text.isdecimal() or int(text) < 1:
            return [f"VLLM_DP_SIZE={text!r} in the environment must be a positive integer"], 1
        return [], int(text)
