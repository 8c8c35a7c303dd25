"""The engine's configuration: typed, checked as a whole, immutable. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.transformers_utils.config import HFConfig

DTYPES = ("float32", "bfloat16", "float16")
DRAFT_METHODS = ("mtp", "ngram", "suffix")
DRAFT_SYNONYMS = {"deepseek_mtp": "mtp", "ngram_gpu": "ngram"}  # vLLM's other names of these
LOAD_FORMATS = ("auto", "safetensors", "dummy")
KV_CACHE_LAYOUTS = ("nd", "nz")
EXPERT_EXCHANGES = ("all_gather", "dispatch")
LOGPROBS_MODES = ("scaled_logprobs", "raw_logprobs", "processed_logprobs")
"""The distribution of reported log-probs: log_softmax(logits / temperature) of the model; log_softmax(logits) of the
model; or the distribution that tokens are drawn from, after edits, temperature and limits."""


@dataclass(frozen=True)
class ModelConfig:
    model: str
    tokenizer: str
    skip_tokenizer_init: bool
    dtype: str  # resolved, one of DTYPES
    seed: int
    max_model_len: int  # tokens of a sequence, prompt and output together
    hf: HFConfig
    quantization: str | None = None  # "fp8": weights are held in FP8 blocks, else in `dtype`


@dataclass(frozen=True)
class CacheConfig:
    block_size: int
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    enable_prefix_caching: bool
    kv_cache_layout: str = "nd"  # one of KV_CACHE_LAYOUTS: the memory layout of a block, shared by prefill and decode
    enable_return_routed_experts: bool = False  # store the experts of every token beside its KV entry


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts that a step verifies; they change no token."""

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 4  # ngram: tokens of the longest end of the text that is looked for
    prompt_lookup_min: int = 2  # of the shortest one, also of suffix
    suffix_max_tokens: int = 1_000_000  # of the texts that suffix remembers, some 100 bytes each
    disable_by_batch_size: int | None = None  # no drafts while more sequences run
    adaptive: bool = True  # no more drafts than pay, by costs that the engine measures; False: all that there are


@dataclass(frozen=True)
class CompilationConfig:
    """Decode steps as captured graphs."""

    enforce_eager: bool | None  # no graphs; None: graphs where the platform can capture them
    cudagraph_capture_sizes: tuple[int, ...]  # sequences of a step, ascending; larger steps run eagerly


def default_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Powers of two below `max_num_seqs`, and `max_num_seqs`: padding never doubles a step."""
    return (*(2**i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs)


@dataclass(frozen=True)
class ParallelConfig:
    """The layout: world rank = tp + TP * (dp + DP * instance)."""

    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    rank: int
    world_size: int
    rebalance_interval: int = 0  # steps between two rounds of moving requests between DP replicas; 0 = never
    # How tokens reach experts on other ranks: every rank gets all tokens and one all-reduce sums the results
    # ("all_gather"), or tokens are sent to the ranks of their experts and back ("dispatch").
    expert_exchange: str = "all_gather"
    # With "dispatch": TP ranks share the tokens of an expert layer out among themselves from attention's output on.
    use_sequence_parallel_moe: bool = False
    force_load_balancing: bool = False  # for benchmarks: every expert gets as many tokens
    # What runs beside the rest of a decode step, on a second stream of the device: the shared experts beside the routed
    # ones and their exchange; writing the cache beside the projection of the queries.
    multistream_overlap_shared_expert: bool = False
    enable_multistream_mla: bool = False
    first_rank: int = 0  # the first torch.distributed rank that has an engine; `rank` counts from it

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor_parallel_size % self.data_parallel_size

    @property
    def replica(self) -> int:
        """The index of this rank's replica (its set of TP ranks) in the world; replicas get different prompts."""
        return self.rank // self.tensor_parallel_size

    @property
    def ranks_per_instance(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        return self.ranks_per_instance if self.enable_expert_parallel else 1

    @property
    def shares_tokens(self) -> bool:
        """Whether each TP rank computes the expert layers of its own share of a replica's tokens alone."""
        return self.use_sequence_parallel_moe and self.tensor_parallel_size > 1

    @property
    def rebalance_steps(self) -> int:
        """Steps between two rounds of moving requests; 0 with a single replica."""
        return self.rebalance_interval if self.data_parallel_size > 1 else 0

    @property
    def steps_in_lockstep(self) -> bool:
        """Whether DP replicas share experts, so that every replica must take part in every step."""
        return self.enable_expert_parallel and self.data_parallel_size > 1


@dataclass(frozen=True)
class WeightTransferConfig:
    """How a trainer in another process sends weights; "ipc", on the same device, is the only backend."""

    backend: str = "nccl"  # vLLM's default, which is refused

    def problems(self) -> list[str]:
        if self.backend == "ipc":
            return []
        return [f"weight_transfer_config: backend={self.backend!r} is not supported, expected 'ipc'"]


@dataclass(frozen=True)
class VllmConfig:
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    compilation: CompilationConfig
    parallel: ParallelConfig
    speculative: SpeculativeConfig | None
    load_format: str
    rollout_ops: str | None  # None: the platform's
    device: str | None
    enable_sleep_mode: bool
    logprobs_mode: str = LOGPROBS_MODES[0]

    def problems(self) -> list[str]:
        """Every problem of this configuration, empty when it can run."""
        return [
            *_model_problems(self.model, self.load_format, self.logprobs_mode),
            *_cache_problems(self.cache, self.model),
            *_scheduler_problems(self.scheduler, self.model.max_model_len),
            *_compilation_problems(self.compilation, self.scheduler.max_num_seqs, self.speculative),
            *_parallel_problems(self.parallel, self.model.hf),
        ]


def _model_problems(model: ModelConfig, load_format: str, logprobs_mode: str) -> Iterator[str]:
    if model.dtype not in DTYPES:
        yield f"dtype={model.dtype!r} is unknown, expected auto or one of {', '.join(DTYPES)}"
    if load_format not in LOAD_FORMATS:
        yield f"load_format={load_format!r} is unknown, expected one of {', '.join(LOAD_FORMATS)}"
    if logprobs_mode not in LOGPROBS_MODES:
        yield f"logprobs_mode={logprobs_mode!r} is unknown, expected one of {', '.join(LOGPROBS_MODES)}"
    if model.max_model_len < 2:
        yield f"max_model_len={model.max_model_len} leaves no room for a prompt and a new token"
    if model.max_model_len > model.hf.max_position_embeddings:
        yield (
            f"max_model_len={model.max_model_len} exceeds the model's max_position_embeddings="
            f"{model.hf.max_position_embeddings}; lower max_model_len"
        )


def _cache_problems(cache: CacheConfig, model: ModelConfig) -> Iterator[str]:
    hf = model.hf
    if cache.block_size < 1:
        yield f"block_size={cache.block_size} must be at least 1"
    if cache.kv_cache_layout not in KV_CACHE_LAYOUTS:
        yield f"kv_cache_layout={cache.kv_cache_layout!r} is unknown, expected one of {', '.join(KV_CACHE_LAYOUTS)}"
    if not 0 < cache.gpu_memory_utilization <= 1:
        yield f"gpu_memory_utilization={cache.gpu_memory_utilization} must be in (0, 1]"
    blocks = cache.num_gpu_blocks_override
    if blocks is not None and cache.block_size >= 1 and blocks * cache.block_size < model.max_model_len:
        yield (
            f"num_gpu_blocks_override={blocks} of block_size={cache.block_size} holds "
            f"{blocks * cache.block_size} tokens, less than one sequence of max_model_len={model.max_model_len}"
        )
    if cache.kv_cache_layout != "nd" and not hf.is_mla:
        yield (
            f"kv_cache_layout={cache.kv_cache_layout!r} is for latents, {hf.architecture} keeps keys and values; use nd"
        )
    if cache.enable_return_routed_experts and not hf.num_moe_layers:
        yield f"enable_return_routed_experts=True: {hf.architecture} has no experts; leave it out"


def _scheduler_problems(scheduler: SchedulerConfig, max_model_len: int) -> Iterator[str]:
    if scheduler.max_num_seqs < 1:
        yield f"max_num_seqs={scheduler.max_num_seqs} must be at least 1"
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        yield (
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than max_num_seqs="
            f"{scheduler.max_num_seqs}: a decode step of all sequences would not fit"
        )
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        yield (
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than max_model_len={max_model_len}: "
            "raise it or enable_chunked_prefill"
        )


def speculative_problems(config: SpeculativeConfig) -> Iterator[str]:
    """Every problem of a ``speculative_config``."""
    if config.method not in DRAFT_METHODS:
        yield f"speculative_config.method={config.method!r} is unknown, expected one of {', '.join(DRAFT_METHODS)}"
    for name, value in vars(config).items():
        if name == "adaptive" and type(value) is not bool:
            yield f"speculative_config.adaptive={value!r} must be true or false"
        elif name not in ("method", "adaptive") and value is not None and (type(value) is not int or value < 1):
            yield f"speculative_config.{name}={value!r} must be a whole number from 1 on"
            return
    if config.prompt_lookup_min > config.prompt_lookup_max:
        yield (
            f"speculative_config.prompt_lookup_min={config.prompt_lookup_min} exceeds "
            f"prompt_lookup_max={config.prompt_lookup_max}"
        )


def _compilation_problems(
    compilation: CompilationConfig, max_num_seqs: int, speculative: SpeculativeConfig | None
) -> Iterator[str]:
    sizes, rows = compilation.cudagraph_capture_sizes, 1
    if speculative is not None:
        rows += speculative.num_speculative_tokens
    if not compilation.enforce_eager and not (sizes and min(sizes) >= 1 and max(sizes) <= rows * max_num_seqs):
        with_drafts = f" times {rows}, a sequence and its drafts" if rows > 1 else ""
        yield (
            f"cudagraph_capture_sizes={list(sizes)} must be numbers of sequences from 1 to max_num_seqs="
            f"{max_num_seqs}{with_drafts}; leave it out for the device's own"
        )


def _parallel_problems(parallel: ParallelConfig, hf: HFConfig) -> Iterator[str]:
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    if tp < 1 or dp < 1:
        yield f"tensor_parallel_size={tp} and data_parallel_size={dp} must be at least 1"
        return
    if parallel.rebalance_interval < 0:
        yield f"rebalance_interval={parallel.rebalance_interval} must be a number of steps, or 0 for never"
    if parallel.world_size % (tp * dp):
        yield (
            f"world size {parallel.world_size} is not a multiple of tensor_parallel_size={tp} x data_parallel_size={dp}"
        )
    if parallel.expert_exchange not in EXPERT_EXCHANGES:
        yield f"expert_exchange={parallel.expert_exchange!r} is unknown, expected one of {', '.join(EXPERT_EXCHANGES)}"
    if parallel.expert_exchange != "all_gather" and not parallel.enable_expert_parallel:
        yield f"expert_exchange={parallel.expert_exchange!r} needs enable_expert_parallel=True"
    if parallel.use_sequence_parallel_moe and parallel.expert_exchange != "dispatch":
        yield "use_sequence_parallel_moe=True needs expert_exchange='dispatch'"
    if parallel.multistream_overlap_shared_expert and not (hf.n_routed_experts and hf.n_shared_experts):
        yield f"multistream_overlap_shared_expert=True: {hf.architecture} has no shared experts here; leave it out"
    if parallel.enable_multistream_mla and not hf.is_mla:
        yield f"enable_multistream_mla=True: {hf.architecture} has no latent attention; leave it out"
    yield from hf.tp_problems(tp)
    if parallel.enable_expert_parallel and not hf.n_routed_experts:
        yield f"enable_expert_parallel=True: {hf.architecture} has no experts; leave it out"
    if hf.n_routed_experts % parallel.expert_parallel_size:
        yield (
            f"n_routed_experts={hf.n_routed_experts} does not divide by the {parallel.expert_parallel_size} ranks of "
            f"expert parallel (tensor_parallel_size={tp} x data_parallel_size={dp})"
        )
