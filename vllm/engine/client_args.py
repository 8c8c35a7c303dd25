"""Arguments of vLLM's `LLM` and `vllm serve` that mean nothing here: taken without effect, or refused by feature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class ClientArg:
    """An argument of vLLM's that `EngineArgs` does not have.

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


_LOCAL = "models are directories: download that revision into one (python -m tools.download --revision)"
_LORA = "LoRA adapters are not supported"
_IMAGES = "models take text only"
_GPUS = "all-reduces are the device's own"

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
    "task": ClientArg("auto", "the engine generates", ("generate",)),
    "runner": ClientArg("auto", "the engine generates", ("generate",)),
    "additional_config": ClientArg(None, "Ascend's graphs and streams are arguments of the engine of their own", ({},)),
    "kv_transfer_config": ClientArg(None, "prefill and decode run in the same engine"),
    "scheduling_policy": ClientArg("fcfs", "a lower priority always runs first", ("priority",)),
    "num_scheduler_steps": ClientArg(1, "each step is scheduled", kind=int),
    "use_v2_block_manager": ClientArg(True, "there is one block manager", None, bool),
    "rope_scaling": ClientArg(None, "edit config.json in the model's directory", ({},)),
    "rope_theta": ClientArg(None, "edit config.json in the model's directory", kind=float),
    "compilation_config": ClientArg(None, "decode steps are captured by enforce_eager and cudagraph_capture_sizes"),
    "guided_decoding_backend": ClientArg("auto", "no request asks for structured outputs", None),
    "max_seq_len_to_capture": ClientArg(8192, "graphs are captured for batches, of sequences of any length", None, int),
    "disable_custom_all_reduce": ClientArg(False, _GPUS, None, bool),
    "disable_async_output_proc": ClientArg(False, "outputs are made after each step", None, bool),
    "disable_cascade_attn": ClientArg(False, "there is no cascade attention", None, bool),
    "disable_log_stats": ClientArg(False, "statistics are at /metrics", None, bool),
}


def take_client_args(
    given: Mapping[str, Any], table: Mapping[str, ClientArg] = CLIENT_ARGS
) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `given` that are not in `table`, and a note on each other one that differs from vLLM's default.

    None leaves an argument at its default where it is no value of its own, as clients mean it.

    ValueError lists every value that asks for something that is not there.
    """
    kept, notes, problems = {}, [], []
    kinds = {one.name: str(one.type) for one in fields(EngineArgs)}
    for name, value in given.items():
        if name not in table:
            if value is not None or "None" in kinds.get(name, "None"):
                kept[name] = value
            continue
        known = table[name]
        if value is None or value == known.default:
            continue
        if known.accepted is None or value in known.accepted:
            notes.append(f"{name}={value!r}: {known.reason}")
        else:
            problems.append(f"{name}={value!r}: {known.reason}")
    if problems:
        raise ValueError("the engine cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return kept, notes
