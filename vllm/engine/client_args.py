"""Arguments of vLLM's `LLM` and `vllm serve` that mean nothing here: taken without effect, or refused by feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClientArg:
    """An argument of vLLM's that `EngineArgs` does not have, or a key of its `speculative_config`.

    Attributes:
        default: vLLM's, which is always accepted.
        reason: why it has no effect; of a refused value, what is missing.
        accepted: values beside the default that are accepted; None means all.
        kind: type of the value on a command line.
    """

    default: Any
    reason: str
    accepted: tuple[Any, ...] | None = ()
    kind: type = str


_OWN_DRAFTS = "drafts come from the texts or the model's prediction layer, not from another model"
_LOCAL = "models are directories: download that revision into one (python -m tools.download --revision)"
_LORA = "LoRA adapters are not supported"
_IMAGES = "models take text only"
_GPUS = "all-reduces are the device's own"
_OPS = "rollout_ops decides which kernels run"
_GRAPHS = "decode steps are captured by enforce_eager and cudagraph_capture_sizes"
_LOADING = "weights are read from their files piece by piece"
_STATISTICS = "statistics are at /metrics"
_EXPERTS = "experts stay on their ranks"
_STRUCTURE = "no request asks for structured outputs"
_LAUNCH = "start one process per device (torchrun, Ray) and build an LLM in each"
_USERS_CODE = "code of users does not run in the engine"
_CONTEXTS = "the cache of a sequence is not split over ranks"
_TRACES = "no traces are sent"
_GENERATES = "the engine generates"

CLIENT_ARGS: dict[str, ClientArg] = {
    "tokenizer_mode": ClientArg("auto", "the tokenizer is transformers' own", ("slow",)),
    "trust_remote_code": ClientArg(False, "code of model directories is never executed", None, bool),
    "revision": ClientArg(None, _LOCAL),
    "code_revision": ClientArg(None, _LOCAL),
    "tokenizer_revision": ClientArg(None, _LOCAL),
    "hf_token": ClientArg(None, "models are directories", None),
    "download_dir": ClientArg(None, "models are directories", None),
    "swap_space": ClientArg(4, "a preempted sequence is computed again and never swapped", None, float),
    "cpu_offload_gb": ClientArg(0, "weights cannot stay on the host while the engine runs", kind=float),
    "pipeline_parallel_size": ClientArg(1, "generation has no pipeline stages", kind=int),
    "kv_cache_dtype": ClientArg("auto", "the KV cache has the weights' dtype"),
    "enable_lora": ClientArg(False, _LORA, kind=bool),
    "max_lora_rank": ClientArg(16, "no adapter is loaded", None, int),
    "max_loras": ClientArg(1, "no adapter is loaded", None, int),
    "limit_mm_per_prompt": ClientArg(None, _IMAGES, ({},)),
    "mm_processor_kwargs": ClientArg(None, _IMAGES, ({},)),
    "model_impl": ClientArg("auto", "the models are the engine's own", ("vllm",)),
    "hf_overrides": ClientArg(None, "edit config.json in the model's directory", ({},)),
    "task": ClientArg("auto", _GENERATES, ("generate",)),
    "runner": ClientArg("auto", _GENERATES, ("generate",)),
    "convert": ClientArg("auto", _GENERATES, ("none",)),
    "pooler_config": ClientArg(None, _GENERATES, ({},)),
    "additional_config": ClientArg(None, "Ascend's graphs and streams are arguments of the engine of their own", None),
    "kv_transfer_config": ClientArg(None, "prefill and decode run in the same engine"),
    "scheduling_policy": ClientArg("fcfs", "a lower priority always runs first", ("priority",)),
    "num_scheduler_steps": ClientArg(1, "each step is scheduled", kind=int),
    "use_v2_block_manager": ClientArg(True, "there is one block manager", None, bool),
    "rope_scaling": ClientArg(None, "edit config.json in the model's directory", ({},)),
    "rope_theta": ClientArg(None, "edit config.json in the model's directory", kind=float),
    "compilation_config": ClientArg(None, _GRAPHS, None),
    "optimization_level": ClientArg(2, _GRAPHS, None, int),
    "performance_mode": ClientArg("balanced", _GRAPHS, None),
    "max_cudagraph_capture_size": ClientArg(None, _GRAPHS, None, int),
    "guided_decoding_backend": ClientArg("auto", _STRUCTURE, None),
    "structured_outputs_config": ClientArg(None, _STRUCTURE, None),
    "max_seq_len_to_capture": ClientArg(8192, "graphs are captured for batches, of sequences of any length", None, int),
    "disable_custom_all_reduce": ClientArg(False, _GPUS, None, bool),
    "disable_async_output_proc": ClientArg(False, "outputs are made after each step", None, bool),
    "disable_cascade_attn": ClientArg(False, "there is no cascade attention", None, bool),
    "disable_log_stats": ClientArg(False, _STATISTICS, None, bool),
    "kv_cache_metrics": ClientArg(False, _STATISTICS, None, bool),
    "cudagraph_metrics": ClientArg(False, _STATISTICS, None, bool),
    "enable_mfu_metrics": ClientArg(False, _STATISTICS, None, bool),
    "enable_logging_iteration_details": ClientArg(False, _STATISTICS, None, bool),
    "aggregate_engine_logging": ClientArg(False, _STATISTICS, None, bool),
    "otlp_traces_endpoint": ClientArg(None, _TRACES),
    "collect_detailed_traces": ClientArg(None, _TRACES),
    "kv_events_config": ClientArg(None, "no events of the cache are sent"),
    "async_scheduling": ClientArg(None, "a step is scheduled when the one before it has ended", None, bool),
    "attention_backend": ClientArg(None, _OPS, None),
    "attention_config": ClientArg(None, _OPS, None),
    "moe_backend": ClientArg("auto", _OPS, None),
    "linear_backend": ClientArg("auto", _OPS, None),
    "enable_flashinfer_autotune": ClientArg(None, _OPS, None, bool),
    "all2all_backend": ClientArg("allgather_reducescatter", "expert_exchange decides", None),
    "enable_dbo": ClientArg(False, "a step computes one batch", None, bool),
    "enable_eplb": ClientArg(False, _EXPERTS, None, bool),
    "eplb_config": ClientArg(None, _EXPERTS, None),
    "expert_placement_strategy": ClientArg("linear", _EXPERTS, None),
    "kv_cache_memory_bytes": ClientArg(None, "num_gpu_blocks_override gives a number of blocks"),
    "kv_offloading_size": ClientArg(None, "a preempted sequence is computed again", None, float),
    "prefix_caching_hash_algo": ClientArg("sha256", "blocks are found by their tokens", None),
    "disable_hybrid_kv_cache_manager": ClientArg(None, "all layers have the same blocks", None, bool),
    "safetensors_load_strategy": ClientArg(None, _LOADING, None),
    "max_parallel_loading_workers": ClientArg(None, _LOADING, None, int),
    "model_loader_extra_config": ClientArg(None, _LOADING, ({},)),
    "use_tqdm_on_load": ClientArg(True, _LOADING, None, bool),
    "mm_processor_cache_gb": ClientArg(4, _IMAGES, None, float),
    "skip_mm_profiling": ClientArg(False, _IMAGES, None, bool),
    "language_model_only": ClientArg(False, _IMAGES, None, bool),
    "enable_prompt_embeds": ClientArg(False, "prompts are texts or token ids", kind=bool),
    "logits_processors": ClientArg(None, _USERS_CODE, ([],)),
    "worker_cls": ClientArg("auto", _USERS_CODE),
    "worker_extension_cls": ClientArg("", _USERS_CODE),
    "scheduler_cls": ClientArg(None, _USERS_CODE),
    "decode_context_parallel_size": ClientArg(1, _CONTEXTS, kind=int),
    "prefill_context_parallel_size": ClientArg(1, _CONTEXTS, kind=int),
    "data_parallel_backend": ClientArg("mp", _LAUNCH, None),
    "data_parallel_size_local": ClientArg(None, _LAUNCH, (1,), int),
    "data_parallel_rank": ClientArg(None, _LAUNCH, kind=int),
    "data_parallel_start_rank": ClientArg(None, _LAUNCH, kind=int),
    "data_parallel_address": ClientArg(None, _LAUNCH),
    "data_parallel_rpc_port": ClientArg(None, _LAUNCH, kind=int),
    "nnodes": ClientArg(1, _LAUNCH, kind=int),
    "node_rank": ClientArg(0, _LAUNCH, kind=int),
    "spec_model": ClientArg(None, _OWN_DRAFTS, ("ngram", "[ngram]")),
}

_REMEMBERED = "suffix_max_tokens limits what is remembered, num_speculative_tokens a draft"
_DRAWN = "a draft is right where it equals the token that the engine draws"

SPECULATIVE_ARGS: dict[str, ClientArg] = {
    "model": ClientArg(None, _OWN_DRAFTS, ("ngram", "[ngram]")),
    "draft_model_config": ClientArg(None, _OWN_DRAFTS),
    "draft_tensor_parallel_size": ClientArg(None, "the prediction layer has the model's layout", None),
    "enforce_eager": ClientArg(None, "the prediction layer has graphs where the model has", None),
    "disable_padded_drafter_batch": ClientArg(False, "steps are padded to the sizes of graphs", None),
    "disable_logprobs": ClientArg(True, "tokens have their log-probs in any case", None),
    "num_speculative_tokens_per_batch_size": ClientArg(None, "costs decide how many drafts a step verifies", None),
    "enable_adaptive_verification": ClientArg(False, "adaptive decides", None),
    "suffix_decoding_max_tree_depth": ClientArg(24, _REMEMBERED, None),
    "suffix_decoding_max_cached_requests": ClientArg(10000, _REMEMBERED, None),
    "suffix_decoding_max_spec_factor": ClientArg(1.0, _REMEMBERED, None),
    "suffix_decoding_min_token_prob": ClientArg(0.1, "the longest end of a text decides", None),
    "rejection_sample_method": ClientArg("standard", _DRAWN, ("strict", "probabilistic", "block")),
    "draft_sample_method": ClientArg("greedy", "drafts are drawn with the noise of their position", None),
}


def take_client_args(
    given: Mapping[str, Any], table: Mapping[str, ClientArg] = CLIENT_ARGS
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The arguments of `given` that are not in `table`; a note on each other one that differs from vLLM's default; and
    a problem for every value that asks for something that is not there.
    """
    kept, notes, problems = {}, [], []
    for name, value in given.items():
        if name not in table:
            kept[name] = value
            continue
        known = table[name]
        if value is None or value == known.default:
            continue
        if known.accepted is None or value in known.accepted:
            notes.append(f"{name}={value!r}: {known.reason}")
        else:
            problems.append(f"{name}={value!r}: {known.reason}")
    return kept, notes, problems
