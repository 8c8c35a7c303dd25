"""EngineArgs: the arguments of an engine, and the checked configuration that follows from them."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.config import (
    DRAFT_SYNONYMS,
    LOGPROBS_MODES,
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    default_capture_sizes,
    speculative_problems,
)
from vllm.engine.client_args import SPECULATIVE_ARGS, take_client_args
from vllm.transformers_utils.config import load_config, resolve_quantization

logger = logging.getLogger(__name__)

_PARTS = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("scheduler", SchedulerConfig),
    ("compilation", CompilationConfig),
    ("parallel", ParallelConfig),
)


_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a help text for the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine under vLLM's names; the help texts are those of the server's command line."""

    model: str
    tokenizer: str | None = option(None, "tokenizer directory; default: the model's")
    skip_tokenizer_init: bool = option(False, "do not load a tokenizer: prompts and outputs are token ids")
    dtype: str = option("auto", "float32 (float), bfloat16 or float16 (half); auto: the checkpoint's")
    seed: int = option(0, "seed of requests that bring none")
    tensor_parallel_size: int = option(1, "ranks that share one replica's weights")
    data_parallel_size: int | None = option(None, "replicas; default: VLLM_DP_SIZE of the environment, else 1")
    enable_expert_parallel: bool = option(False, "share the experts among all ranks of all replicas")
    rebalance_interval: int = option(0, "steps between two rounds of moving requests between replicas; 0: never")
    distributed_executor_backend: str | None = option(
        "external_launcher", "the only one: the caller starts the processes; one process may also say mp or uni"
    )
    max_model_len: int | None = option(None, "tokens of a sequence, prompt and output; default: the model's maximum")
    max_num_seqs: int = option(256, "sequences of a step")
    max_num_batched_tokens: int | None = option(None, "tokens of a step; default: 2048, or more where needed")
    gpu_memory_utilization: float = option(0.9, "fraction of the device's memory that the engine may use")
    num_gpu_blocks_override: int | None = option(None, "KV blocks; default: as many as fit")
    block_size: int = option(16, "tokens of a KV block")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prompt prefixes")
    kv_cache_layout: str = option("nd", "memory layout of a KV block: nd or nz")
    enable_return_routed_experts: bool = option(False, "return CompletionOutput.routed_experts, for replay in training")
    expert_exchange: str = option("all_gather", "how tokens reach experts of other ranks: all_gather or dispatch")
    use_sequence_parallel_moe: bool = option(
        False, "with dispatch: TP ranks share out the tokens of expert layers, and each holds the shared experts whole"
    )
    force_load_balancing: bool = option(False, "benchmarks: every expert gets as many tokens, whatever the router says")
    multistream_overlap_shared_expert: bool = option(
        False, "npu: shared experts of a decode step on a second stream, beside the routed ones"
    )
    enable_multistream_mla: bool = option(
        False, "npu: the cache of a decode step is written on a second stream, beside the queries' projection"
    )
    enable_sleep_mode: bool = option(True, "allow LLM.sleep and wake_up")
    enforce_eager: bool | None = option(
        True, "do not capture decode steps as graphs; None captures them where the device and its software can"
    )
    cudagraph_capture_sizes: Sequence[int] | None = option(
        None, "batch sizes of graphs; default: powers of two to max_num_seqs, on npu max_num_seqs alone"
    )
    speculative_config: Mapping[str, Any] | None = option(
        None, 'drafts that steps verify: {"method": "ngram", "num_speculative_tokens": 4}; they change no token'
    )
    spec_method: str | None = option(None, "speculative_config.method")
    spec_tokens: int | None = option(None, "speculative_config.num_speculative_tokens")
    load_format: str = option("auto", "auto, safetensors, or dummy (no weights are read)")
    quantization: str | None = option(None, "fp8 or dequantize; default: as the checkpoint stores its weights")
    rollout_ops: str | None = option(None, "provider of the op table, module:function; default: the platform's")
    device: str | None = option(None, "cpu, cuda or npu; default: what this machine has")
    logprobs_mode: str = option(
        LOGPROBS_MODES[0], "the distribution of reported log-probs: " + ", ".join(LOGPROBS_MODES)
    )

    def create_engine_config(
        self,
        rank: int,
        world_size: int,
        first_rank: int = 0,
        capture_sizes: Callable[[int], tuple[int, ...]] = default_capture_sizes,
    ) -> VllmConfig:
        """Return the configuration of one process; ValueError lists every problem.

        `rank` and `world_size` count the engine's ranks, which are torch.distributed's ranks from `first_rank` on;
        `capture_sizes` returns the sizes of graphs for max_num_seqs, where no sizes are given.
        """
        hf = load_config(self.model)
        max_model_len = hf.max_position_embeddings if self.max_model_len is None else self.max_model_len
        problems, dp_size = self._data_parallel_size()
        found, quantization = resolve_quantization(self.model, self.quantization)
        problems += found
        batched_tokens = self.max_num_batched_tokens
        if batched_tokens is None:
            batched_tokens = max(2048, self.max_num_seqs, 0 if self.enable_chunked_prefill else max_model_len)
        found, given = self._whole_speculative_config()
        problems += found
        found, speculative = read_speculative_config(given)
        problems += found
        num_rows = self.max_num_seqs  # of a decode step, where each draft has one
        if speculative is not None and speculative.method == "mtp":
            if hf.num_nextn_predict_layers:
                hf = hf.with_mtp(1)
            else:
                problems.append(
                    "speculative_config.method='mtp': config.json has num_nextn_predict_layers 0, no prediction layer"
                )
        if speculative is not None:
            num_rows = min(self.max_num_seqs * (1 + speculative.num_speculative_tokens), batched_tokens)
        sizes = set(self.cudagraph_capture_sizes or ())
        if self.cudagraph_capture_sizes is None:
            sizes = {*capture_sizes(self.max_num_seqs), *capture_sizes(num_rows)}
        values = vars(self) | {
            "tokenizer": self.tokenizer or self.model,
            "dtype": hf.torch_dtype if self.dtype == "auto" else _DTYPES.get(self.dtype, self.dtype),
            "max_model_len": max_model_len,
            "hf": hf,
            "quantization": quantization,
            "max_num_batched_tokens": batched_tokens,
            "cudagraph_capture_sizes": tuple(sorted(sizes)),
            "data_parallel_size": dp_size,
            "speculative": speculative,
            "rank": rank,
            "world_size": world_size,
            "first_rank": first_rank,
        }
        config: VllmConfig = _dataclass_of(
            VllmConfig, values | {name: _dataclass_of(kind, values) for name, kind in _PARTS}
        )
        is_alone = world_size == 1 and self.distributed_executor_backend in (None, "uni", "mp")
        if self.distributed_executor_backend != "external_launcher" and not is_alone:
            problems.append(
                f"distributed_executor_backend={self.distributed_executor_backend!r}: only 'external_launcher' is "
                "supported; start one process per device (torchrun, Ray) and build an LLM in each"
            )
        problems += config.problems()
        if problems:
            raise engine_error(problems)
        return config

    def _whole_speculative_config(self) -> tuple[list[str], dict[str, Any]]:
        """Return (problems, ``speculative_config`` with what has an argument of its own)."""
        whole, problems = dict(self.speculative_config or {}), []
        for argument, name in (("spec_method", "method"), ("spec_tokens", "num_speculative_tokens")):
            value = getattr(self, argument)
            if value is not None and whole.setdefault(name, value) != value:
                problems.append(
                    f"{argument}={value!r}, and speculative_config.{name}={whole[name]!r}: give one of them"
                )
        return problems, whole

    def _data_parallel_size(self) -> tuple[list[str], int]:
        """Return (problems, size), from the argument or else from the environment."""
        if self.data_parallel_size is not None:
            return [], self.data_parallel_size
        text = os.environ.get("VLLM_DP_SIZE", "1")
        if not text.isdecimal() or int(text) < 1:
            return [f"VLLM_DP_SIZE={text!r} in the environment must be a positive integer"], 1
        return [], int(text)


def read_speculative_config(given: Mapping[str, Any] | None) -> tuple[list[str], SpeculativeConfig | None]:
    """The problems of vLLM's ``speculative_config``, and what it says where it has none; an empty one is none."""
    if not given:
        return [], None
    kept, notes, refused = take_client_args(given, SPECULATIVE_ARGS)
    problems = [f"speculative_config.{problem}" for problem in refused]
    names = [one.name for one in fields(SpeculativeConfig)]
    problems += [
        f"speculative_config has no {name!r}; it has {', '.join(names)}" for name in sorted(kept.keys() - set(names))
    ]
    if given.get("model") in ("ngram", "[ngram]"):
        kept.setdefault("method", "ngram")
    # Where one is given, the other's default makes room.
    for name, other, of in (("min", "max", min), ("max", "min", max)):
        value = kept.get(f"prompt_lookup_{other}")
        if isinstance(value, int):
            kept.setdefault(f"prompt_lookup_{name}", of(value, getattr(SpeculativeConfig, f"prompt_lookup_{name}")))
    problems += [
        f"speculative_config.{name} is missing" for name in ("method", "num_speculative_tokens") if name not in kept
    ]
    if not problems:
        made = SpeculativeConfig(**kept | {"method": DRAFT_SYNONYMS.get(kept["method"], kept["method"])})
        problems = list(speculative_problems(made))
        if not problems:
            if notes:
                logger.info("taken without effect:\n  %s", "\n  ".join(f"speculative_config.{n}" for n in notes))
            return [], made
    return problems, None


def unknown_arguments(given: Iterable[str]) -> list[str]:
    """A problem for each name that `EngineArgs` does not have."""
    names = [one.name for one in fields(EngineArgs)]
    problems = []
    for name in sorted(set(given) - set(names)):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        problems.append(f"LLM has no argument {name}" + (f", did you mean {close[0]}?" if close else ""))
    return problems


def engine_error(problems: Sequence[str]) -> ValueError:
    """What is raised where arguments have problems."""
    return ValueError("the engine cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `EngineArgs` as clients mean them: None is the default where it is no value of its own."""
    kinds = {one.name: str(one.type) for one in fields(EngineArgs)}
    return {name: value for name, value in given.items() if value is not None or "None" in kinds.get(name, "None")}


def _dataclass_of(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return the dataclass `kind` with the values of its fields' names."""
    return kind(**{one.name: values[one.name] for one in fields(kind)})
