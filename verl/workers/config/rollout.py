"""Config of generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl.workers.config.keys import SHARE, TRAINED_DTYPES, Idle, Section, Values, at_least, beside, key, one_of
from verl.workers.config.multi_turn import AgentConfig, MultiTurnConfig
from verl.workers.config.profiler import NO_PROFILER, ProfilerConfig

_QUANTIZATIONS = Values("expected fp8, dequantize, or leave it out", ("fp8", "dequantize").__contains__)
_GREEDY = Idle("{where}.do_sample is False: the likeliest token is taken", lambda run, own: not own.do_sample)
_NO_OLD_LOG_PROBS = Idle(
    "no old log-probs: a step makes one update",
    lambda run, own: not run.needs_old_log_prob and run.trainer.log_samples_freq <= 0,
)
_BY_TOKENS = beside("log_prob_use_dynamic_bsz", True)
_SHARED_RANKS = Idle(
    "actor and rollout share their processes: actor.profiler decides", lambda run, own: not run.has_rollout_ranks
)


@dataclass(frozen=True)
class SamplingConfig(Section):
    """How validation samples."""

    temperature: float = key(0.0, _GREEDY)  #: divisor of the logits; 0 takes the likeliest token.
    top_k: int = key(-1, _GREEDY)  #: sample from this many of the likeliest tokens; -1 means all.
    top_p: float = key(1.0, SHARE, _GREEDY)  #: sample from the likeliest tokens that together have this probability.
    do_sample: bool = False  #: sample; False takes the likeliest token, whatever the temperature is.
    n: int = key(1, at_least(1))  #: responses to each problem.
    #: with ``do_sample``, answer every set once more with the likeliest tokens, as the set ``greedy`` or
    #: ``<set>_greedy``.
    also_greedy: bool = False

    def contradictions(self, where: str) -> Iterator[str]:
        if self.also_greedy and not self.do_sample:
            yield f"{where}.also_greedy is True, but without {where}.do_sample=True every answer is greedy"


@dataclass(frozen=True)
class RolloutConfig(Section):
    """The rollout engine and how it samples for training; lengths are tokens."""

    name: str = key("vllm", one_of("vllm"))  #: the rollout engine; there is one.
    mode: str = key("sync", one_of("sync"))  #: ``sync`` generates whole batches; there is no other mode.
    #: divisor of the logits, in training's log-probs too.
    temperature: float = key(1.0, Values("training samples need a temperature above 0", lambda value: value > 0))
    top_k: int = -1  #: sample from this many of the likeliest tokens; -1 means all, any other value biases training.
    #: sample from the likeliest tokens that together have this probability; below 1 it biases training.
    top_p: float = key(1.0, SHARE)
    n: int = key(1, at_least(1))  #: responses to each prompt, the group that GRPO compares.
    prompt_length: int = 512  #: tokens of the longest prompt.
    response_length: int = 512  #: tokens after which a response is cut.
    dtype: str = key("bfloat16", TRAINED_DTYPES)  #: dtype of weights and cache.
    gpu_memory_utilization: float = key(0.5, SHARE)  #: share of the device's memory for weights and cache together.
    ignore_eos: bool = False  #: generate every response to its full length; for throughput measurements only.
    #: decode without captured graphs; False and absent mean graphs where the device and its software can capture them,
    #: and a line in the log where they cannot.
    enforce_eager: bool | None = None
    #: numbers of sequences that graphs are captured for; absent means powers of two up to ``max_num_seqs``, on an NPU
    #: ``max_num_seqs`` alone.
    cudagraph_capture_sizes: list[int] | None = key(
        None, names={"0.9.0": "engine_kwargs.vllm.compilation_config.cudagraph_capture_sizes"}
    )
    #: ``fp8`` keeps linear weights in e4m3 blocks of 128 x 128, which the trainer quantises before it sends them, and
    #: multiplies in FP8 where the device does; ``dequantize`` widens the weights of an FP8 model; absent means the form
    #: of the model's files.
    quantization: str | None = key(None, _QUANTIZATIONS)
    tensor_model_parallel_size: int = 1  #: ranks that split every layer.
    #: replicas of ``tensor_model_parallel_size`` ranks that share experts; absent means all of them, fewer means
    #: several independent engines.
    data_parallel_size: int | None = None
    #: assign whole experts to the ranks of an engine; False splits each expert over the ranks of a replica, which is
    #: also what happens if the key is not given and the experts do not divide.
    enable_expert_parallel: bool = True
    max_num_seqs: int = key(1024, at_least(1))  #: sequences that a replica decodes at the same time.
    max_num_batched_tokens: int = 8192  #: tokens that a replica computes in one step.
    #: tokens that one sequence may have; absent means ``prompt_length`` + ``response_length``.
    max_model_len: int | None = key(None, names={"0.9.0": "engine_kwargs.vllm.max_model_len"})
    enable_chunked_prefill: bool = True  #: compute long prompts over several steps.
    enable_prefix_caching: bool = True  #: compute equal beginnings of prompts once.
    block_size: int = 16  #: tokens of one block of the cache.
    num_gpu_blocks_override: int | None = None  #: blocks of the cache; absent means as many as the memory allows.
    kv_cache_layout: str = key("nd", one_of("nd", "nz"))  #: ``nd``, or ``nz`` on an NPU.
    #: how tokens reach the experts of other ranks: ``all_gather`` sends all to all ranks, ``dispatch`` sends each to
    #: its experts.
    expert_exchange: str = key("all_gather", one_of("all_gather", "dispatch"))
    #: with ``dispatch``, share the tokens of expert layers out among the tensor-parallel ranks from attention's output
    #: on: half of what their all-reduces send, but shared experts whole on each.
    use_sequence_parallel_moe: bool = False
    #: on an NPU, run the shared experts of a decode step on a second stream, beside the routed ones.
    multistream_overlap_shared_expert: bool = False
    #: on an NPU, write the cache of a decode step on a second stream, beside the projection of its queries.
    enable_multistream_mla: bool = False
    fix_router: bool = False  #: give every expert the same number of tokens, as ``actor.megatron.fix_router``.
    #: engine steps between two rounds of moving requests between data-parallel replicas; 0 means never.
    rebalance_interval: int = key(0, Values("give a number of steps, or 0 for never", lambda value: value >= 0))
    #: drafts that a step of the engine verifies, as ``{method: suffix, num_speculative_tokens: 4}``; they change no
    #: token (docs/rollout_engine.md).
    speculative_config: dict[str, Any] = key(
        dict, takes_names=True, names={"0.9.0": "engine_kwargs.vllm.speculative_config"}
    )
    enable_rollout_routing_replay: bool = False  #: return the experts of every token, for router replay R3.
    #: samples of one forward pass of the old log-probs on a rank.
    log_prob_micro_batch_size_per_gpu: int | None = key(None, _NO_OLD_LOG_PROBS, _BY_TOKENS)
    log_prob_use_dynamic_bsz: bool = key(False, _NO_OLD_LOG_PROBS)  #: fill those micro-batches by tokens instead.
    #: packed tokens of such a micro-batch on each rank; a longer sample gets one of its own.
    log_prob_max_token_len_per_gpu: int = key(16384, _NO_OLD_LOG_PROBS, beside("log_prob_use_dynamic_bsz", False))
    #: the most memory of a rank's buffers in one round of a weight sync, in MiB; two rounds exist at a time.
    update_weights_bucket_megabytes: int = key(
        512, names={"0.9.0": "checkpoint_engine.update_weights_bucket_megabytes"}
    )
    #: report the log-prob of every token that the rollout samples, which the gap metrics need.
    calculate_log_probs: bool = True
    seed: int = 0  #: seed of sampling; the noise of a response depends on (seed, step, row).
    val_kwargs: SamplingConfig = key(SamplingConfig)
    multi_turn: MultiTurnConfig = key(MultiTurnConfig)
    agent: AgentConfig = key(AgentConfig)
    profiler: ProfilerConfig = key(ProfilerConfig, NO_PROFILER, _SHARED_RANKS)

    def replicas_per_engine(self, world_size: int) -> int:
        return self.data_parallel_size or world_size // self.tensor_model_parallel_size

    def experts_over(self, world_size: int) -> int:
        """Ranks that the experts of one engine are split over, with ``enable_expert_parallel``."""
        return self.tensor_model_parallel_size * self.replicas_per_engine(world_size)

    @property
    def draft_method(self) -> str:
        """That of ``speculative_config`` by the engine's own name; empty without drafts."""
        if not self.speculative_config:
            return ""
        from vllm.config import DRAFT_SYNONYMS  # loads torch

        method = str(self.speculative_config.get("method", ""))
        return DRAFT_SYNONYMS.get(method, method)

    @property
    def context_length(self) -> int:
        return self.max_model_len or self.prompt_length + self.response_length

    def contradictions(self, where: str) -> Iterator[str]:
        if self.speculative_config:
            from vllm.engine.arg_utils import read_speculative_config  # loads torch

            yield from (f"{where}.{problem}" for problem in read_speculative_config(self.speculative_config)[0])
        if self.expert_exchange != "all_gather" and not self.enable_expert_parallel:
            yield f"{where}.expert_exchange is {self.expert_exchange!r}; it needs {where}.enable_expert_parallel=True"
        if self.use_sequence_parallel_moe and self.expert_exchange != "dispatch":
            yield f"{where}.use_sequence_parallel_moe is True; it needs {where}.expert_exchange=dispatch"
        sizes, num_drafts = self.cudagraph_capture_sizes, self.speculative_config.get("num_speculative_tokens", 0)
        most = self.max_num_seqs * (1 + num_drafts if isinstance(num_drafts, int) else 1)
        if sizes is not None and (not sizes or min(sizes) < 1 or max(sizes) > most):
            with_drafts = f" and its drafts, {most}" if num_drafts else f" {most}"
            yield (
                f"{where}.cudagraph_capture_sizes is {list(sizes)}; give numbers of sequences from 1 to max_num_seqs"
                f"{with_drafts}, or leave it out"
            )
        if self.max_model_len is not None and self.max_model_len < self.prompt_length + self.response_length:
            yield (
                f"{where}.max_model_len {self.max_model_len} is below prompt_length {self.prompt_length} + "
                f"response_length {self.response_length}"
            )
        turns = self.multi_turn
        makers = {
            f"{where}.multi_turn.environment.path": turns.environment.path is not None,
            f"{where}.multi_turn.tool_config_path": turns.tool_config_path is not None and not self.agent.has_loops,
            f"{where}.agent.agent_loop_config_path": self.agent.has_loops,
        }
        if turns.enable and sum(makers.values()) != 1:
            yield f"{where}.multi_turn.enable is True: give one of {', '.join(makers)}"
        if self.agent.has_loops and not turns.enable:
            yield f"{where}.agent names an agent loop; set {where}.multi_turn.enable=True, by which samples have turns"
        if turns.enable and self.rebalance_interval:
            yield f"{where}.rebalance_interval must be 0 with {where}.multi_turn: samples stay with their environments"
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.prompt_length:
            yield (
                f"{where}.max_num_batched_tokens {self.max_num_batched_tokens} is below prompt_length "
                f"{self.prompt_length} and enable_chunked_prefill is False"
            )

    def device_problems(self, where: str, device: str) -> Iterator[str]:
        """Settings that the engine does not have on ``device``; ``auto`` passes, since only the workers resolve it."""
        if device == "npu" and self.quantization == "fp8":
            yield f"{where}.quantization is 'fp8', but an NPU has no FP8 tensors; leave it out"
        if device in ("cpu", "cuda") and self.kv_cache_layout != "nd":
            yield f"{where}.kv_cache_layout is {self.kv_cache_layout!r}, which only an NPU has; use nd"
        for switch in ("multistream_overlap_shared_expert", "enable_multistream_mla"):
            if device in ("cpu", "cuda") and getattr(self, switch):
                yield f"{where}.{switch} needs an NPU's second stream; leave it out"

    def warnings(self, where: str) -> Iterator[str]:
        """Settings that run but bias training."""
        if self.top_p != 1.0 or self.top_k not in (-1, 0):
            yield (
                f"{where}: top_p {self.top_p} / top_k {self.top_k} cut the sampling distribution, while log-probs are "
                "those of the whole vocabulary; the policy gradient is then slightly off-policy"
            )
