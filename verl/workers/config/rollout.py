"""Config of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from verl.workers.config.profiler import ProfilerConfig
from verl.workers.config.values import TRAINED_DTYPES, Section, Values, at_least, one_of

_SHARE = Values("expected (0, 1]", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class SamplingConfig(Section):
    """How validation samples.

    Attributes:
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: sample from this many of the likeliest tokens; -1 means all.
        top_p: sample from the likeliest tokens that together have this probability.
        do_sample: sample; False takes the likeliest token, whatever the temperature is.
        n: responses to each problem.
        also_greedy: with ``do_sample``, answer every set once more with the likeliest tokens, as the set ``greedy`` or
            ``<set>_greedy``.
    """

    VALUES: ClassVar = {"top_p": _SHARE, "n": at_least(1)}

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    do_sample: bool = False
    n: int = 1
    also_greedy: bool = False

    def contradictions(self, where: str) -> list[str]:
        if self.also_greedy and not self.do_sample:
            return [f"{where}.also_greedy is True, but without {where}.do_sample=True every answer is greedy"]
        return []


@dataclass(frozen=True)
class RolloutConfig(Section):
    """The rollout engine and how it samples for training; lengths are tokens.

    Attributes:
        name: the rollout engine; there is one.
        mode: ``sync`` generates whole batches; there is no other mode.
        temperature: divisor of the logits, in training's log-probs too.
        top_k: sample from this many of the likeliest tokens; -1 means all, any other value biases training.
        top_p: sample from the likeliest tokens that together have this probability; below 1 it biases training.
        n: responses to each prompt, the group that GRPO compares.
        prompt_length: tokens of the longest prompt.
        response_length: tokens after which a response is cut.
        dtype: dtype of weights and cache.
        gpu_memory_utilization: share of the device's memory for weights and cache together.
        ignore_eos: generate every response to its full length; for throughput measurements only.
        enforce_eager: decode without captured graphs; False and absent mean graphs where the device and its software
            can capture them, and a line in the log where they cannot.
        cudagraph_capture_sizes: numbers of sequences that graphs are captured for; absent means powers of two up to
            ``max_num_seqs``, on an NPU ``max_num_seqs`` alone.
        quantization: ``fp8`` keeps linear weights in e4m3 blocks of 128 x 128, which the trainer quantises before it
            sends them, and multiplies in FP8 where the device does; ``dequantize`` widens the weights of an FP8 model;
            absent means the form of the model's files.
        tensor_model_parallel_size: ranks that split every layer.
        data_parallel_size: replicas of ``tensor_model_parallel_size`` ranks that share experts; absent means all of
            them, fewer means several independent engines.
        enable_expert_parallel: assign whole experts to the ranks of an engine; False splits each expert over the ranks
            of a replica, which is also what happens if the key is not given and the experts do not divide.
        max_num_seqs: sequences that a replica decodes at the same time.
        max_num_batched_tokens: tokens that a replica computes in one step.
        max_model_len: tokens that one sequence may have; absent means ``prompt_length`` + ``response_length``.
        enable_chunked_prefill: compute long prompts over several steps.
        enable_prefix_caching: compute equal beginnings of prompts once.
        block_size: tokens of one block of the cache.
        num_gpu_blocks_override: blocks of the cache; absent means as many as the memory allows.
        kv_cache_layout: ``nd``, or ``nz`` on an NPU.
        expert_exchange: how tokens reach the experts of other ranks: ``all_gather`` sends all to all ranks,
            ``dispatch`` sends each to its experts.
        use_sequence_parallel_moe: with ``dispatch``, share the tokens of expert layers out among the tensor-parallel
            ranks from attention's output on: half of what their all-reduces send, but shared experts whole on each.
        multistream_overlap_shared_expert: on an NPU, run the shared experts of a decode step on a second stream, beside
            the routed ones.
        enable_multistream_mla: on an NPU, write the cache of a decode step on a second stream, beside the projection of
            its queries.
        fix_router: give every expert the same number of tokens, as ``actor.megatron.fix_router``.
        rebalance_interval: engine steps between two rounds of moving requests between data-parallel replicas; 0 means
            never.
        enable_rollout_routing_replay: return the experts of every token, for router replay R3.
        log_prob_micro_batch_size_per_gpu: samples of one forward pass of the old log-probs on a rank.
        log_prob_use_dynamic_bsz: fill those micro-batches by tokens instead.
        log_prob_max_token_len_per_gpu: packed tokens of such a micro-batch on each rank; a longer sample gets one
            of its own.
        update_weights_bucket_megabytes: the most memory of a rank's buffers in one round of a weight sync, in MiB; two
            rounds exist at a time.
        calculate_log_probs: report the log-prob of every token that the rollout samples, which the gap metrics need.
        seed: seed of sampling; the noise of a response depends on (seed, step, row).
    """

    VALUES: ClassVar = {
        "name": one_of("vllm"),
        "mode": one_of("sync"),
        "temperature": Values("training samples need a temperature above 0", lambda value: value > 0),
        "top_p": _SHARE,
        **dict.fromkeys(("n", "max_num_seqs"), at_least(1)),
        "dtype": TRAINED_DTYPES,
        "gpu_memory_utilization": _SHARE,
        "quantization": Values("expected fp8, dequantize, or leave it out", ("fp8", "dequantize").__contains__),
        "kv_cache_layout": one_of("nd", "nz"),
        "expert_exchange": one_of("all_gather", "dispatch"),
        "rebalance_interval": Values("give a number of steps, or 0 for never", lambda value: value >= 0),
    }

    name: str = "vllm"
    mode: str = "sync"
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    n: int = 1
    prompt_length: int = 512
    response_length: int = 512
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.5
    ignore_eos: bool = False
    enforce_eager: bool | None = None
    cudagraph_capture_sizes: list[int] | None = None
    quantization: str | None = None
    tensor_model_parallel_size: int = 1
    data_parallel_size: int | None = None
    enable_expert_parallel: bool = True
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_layout: str = "nd"
    expert_exchange: str = "all_gather"
    use_sequence_parallel_moe: bool = False
    multistream_overlap_shared_expert: bool = False
    enable_multistream_mla: bool = False
    fix_router: bool = False
    rebalance_interval: int = 0
    enable_rollout_routing_replay: bool = False
    log_prob_micro_batch_size_per_gpu: int | None = None
    log_prob_use_dynamic_bsz: bool = False
    log_prob_max_token_len_per_gpu: int = 16384
    update_weights_bucket_megabytes: int = 512
    calculate_log_probs: bool = True
    seed: int = 0
    val_kwargs: SamplingConfig = field(default_factory=SamplingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def replicas_per_engine(self, world_size: int) -> int:
        return self.data_parallel_size or world_size // self.tensor_model_parallel_size

    def experts_over(self, world_size: int) -> int:
        """Ranks that the experts of one engine are split over, with ``enable_expert_parallel``."""
        return self.tensor_model_parallel_size * self.replicas_per_engine(world_size)

    @property
    def context_length(self) -> int:
        return self.max_model_len or self.prompt_length + self.response_length

    def contradictions(self, where: str) -> list[str]:
        found = []
        if self.expert_exchange != "all_gather" and not self.enable_expert_parallel:
            found.append(
                f"{where}.expert_exchange is {self.expert_exchange!r}; it needs {where}.enable_expert_parallel=True"
            )
        if self.use_sequence_parallel_moe and self.expert_exchange != "dispatch":
            found.append(f"{where}.use_sequence_parallel_moe is True; it needs {where}.expert_exchange=dispatch")
        sizes = self.cudagraph_capture_sizes
        if sizes is not None and (not sizes or min(sizes) < 1 or max(sizes) > self.max_num_seqs):
            found.append(
                f"{where}.cudagraph_capture_sizes is {list(sizes)}; give numbers of sequences from 1 to max_num_seqs "
                f"{self.max_num_seqs}, or leave it out"
            )
        if self.max_model_len is not None and self.max_model_len < self.prompt_length + self.response_length:
            found.append(
                f"{where}.max_model_len {self.max_model_len} is below prompt_length {self.prompt_length} + "
                f"response_length {self.response_length}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.prompt_length:
            found.append(
                f"{where}.max_num_batched_tokens {self.max_num_batched_tokens} is below prompt_length "
                f"{self.prompt_length} and enable_chunked_prefill is False"
            )
        return found

    def device_problems(self, where: str, device: str) -> list[str]:
        """Settings that the engine does not have on ``device``; ``auto`` passes, since only the workers resolve it."""
        found = []
        if device == "npu" and self.quantization == "fp8":
            found.append(f"{where}.quantization is 'fp8', but an NPU has no FP8 tensors; leave it out")
        if device in ("cpu", "cuda") and self.kv_cache_layout != "nd":
            found.append(f"{where}.kv_cache_layout is {self.kv_cache_layout!r}, which only an NPU has; use nd")
        for switch in ("multistream_overlap_shared_expert", "enable_multistream_mla"):
            if device in ("cpu", "cuda") and getattr(self, switch):
                found.append(f"{where}.{switch} needs an NPU's second stream; leave it out")
        return found

    def warnings(self, where: str) -> list[str]:
        """Settings that run but bias training."""
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            return [
                f"{where}: top_p {self.top_p} / top_k {self.top_k} cut the sampling distribution, while log-probs are "
                "those of the whole vocabulary; the policy gradient is then slightly off-policy"
            ]
        return []
