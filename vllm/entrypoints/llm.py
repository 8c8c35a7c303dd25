"""LLM: the engine as a Python object, one per process under an external launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from vllm.distributed.parallel_state import init_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import PromptType
from vllm.ops.contract import resolve
from vllm.outputs import RequestOutput
from vllm.platforms import Platform, resolve_platform
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import PromptGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SLEEP_TAGS = ("weights", "kv_cache")


class LLM:
    """Generates for a Hugging Face model directory; arguments are those of `EngineArgs`.

    With several processes, torch.distributed is initialised by the caller and every process builds an LLM with the same
    arguments: rank = tp + TP * (dp + DP * instance). The TP ranks of a replica call `generate` with the same prompts,
    replicas with different ones; replicas that share experts (enable_expert_parallel) or move requests between them
    (rebalance_interval) all call it, with an empty list if they have none.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        enable_expert_parallel: bool = False,
        rebalance_interval: int = 0,
        distributed_executor_backend: str = "external_launcher",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_gpu_blocks_override: int | None = None,
        block_size: int = 16,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = False,
        kv_cache_layout: str = "nd",
        expert_exchange: str = "all_gather",
        enable_sleep_mode: bool = True,
        enforce_eager: bool = True,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        load_format: str = "auto",
        rollout_ops: str = "vllm.ops.reference:rollout_ops",
        device: str | None = None,
    ) -> None:
        args = EngineArgs(
            model=model,
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype,
            seed=seed,
            tensor_parallel_size=tensor_parallel_size,
            data_parallel_size=data_parallel_size,
            enable_expert_parallel=enable_expert_parallel,
            rebalance_interval=rebalance_interval,
            distributed_executor_backend=distributed_executor_backend,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks_override=num_gpu_blocks_override,
            block_size=block_size,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_layout=kv_cache_layout,
            expert_exchange=expert_exchange,
            enable_sleep_mode=enable_sleep_mode,
            enforce_eager=enforce_eager,
            cudagraph_capture_sizes=cudagraph_capture_sizes,
            load_format=load_format,
            rollout_ops=rollout_ops,
            device=device,
        )
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.config = args.create_engine_config(rank, world_size)
        platform, ops = resolve_platform(self.config.device), resolve(self.config.rollout_ops)
        problems = platform.config_problems(self.config, ops)
        if problems:
            raise ValueError("the engine cannot be built:\n" + "\n".join(f"  - {p}" for p in problems))
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if not self.config.model.skip_tokenizer_init:
            self.tokenizer = get_tokenizer(self.config.model.tokenizer)
        logger.info("rollout ops on %s: %s", platform.name, ops.names)
        self.parallel = init_model_parallel(self.config.parallel)
        self.core = EngineCore(self.config, self.parallel, platform, ops, platform.device(_local_rank(rank, platform)))
        self.engine = LLMEngine(self.config, self.core)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order; every sample runs to its end.

        ValueError lists all prompts that cannot be run (index, length, limit); RuntimeError while the engine sleeps.
        use_tqdm is accepted for vLLM's callers; progress is the caller's business.
        """
        prompt_list = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        params = sampling_params if sampling_params is not None else SamplingParams()
        param_list = [params] * len(prompt_list) if isinstance(params, SamplingParams) else list(params)
        if len(param_list) != len(prompt_list):
            raise ValueError(
                f"{len(prompt_list)} prompts came with {len(param_list)} sampling_params, expected as many"
            )
        groups = [
            self._group(index, prompt, p) for index, (prompt, p) in enumerate(zip(prompt_list, param_list, strict=True))
        ]
        self.engine.generate(groups)
        return [group.output(self._decoder(group.params)) for group in groups]

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache. Level 1 keeps the weights on the host.

        Level 2 drops them, new ones must be loaded.
        """
        if not self.config.enable_sleep_mode:
            raise RuntimeError("sleep: the engine was built with enable_sleep_mode=False")
        if level not in (1, 2):
            raise ValueError(f"sleep level {level} is unknown, expected 1 (keep weights on the host) or 2 (drop them)")
        self.core.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights" (empty buffers after level 2) and "kv_cache" (the same block count); None means both."""
        wanted = list(SLEEP_TAGS if tags is None else tags)
        unknown = [tag for tag in wanted if tag not in SLEEP_TAGS]
        if unknown:
            raise ValueError(f"wake_up tags {unknown} are unknown, expected some of {list(SLEEP_TAGS)}")
        self.core.wake_up(wanted)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take (hf_name, full tensor) pairs, all of the model or a part, in any order; returns the names taken.

        ValueError for an unknown name or a wrong shape; multi-token-prediction layers are skipped. Cached prefixes are
        forgotten.
        """
        return self.core.load_weights(weights)

    def check_weights_loaded(self) -> None:
        """ValueError naming every weight that has not come since a level-2 sleep.

        Call it after the last load_weights.
        """
        self.core.worker.check_weights_loaded()

    def get_memory_report(self) -> dict[str, int]:
        """Bytes held by weights, host copies and KV cache, the number of KV blocks, and the device's free and total
        bytes.
        """
        return self.core.worker.memory_report()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; ValueError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ValueError("no tokenizer: the engine was built with skip_tokenizer_init=True")
        return self.tokenizer

    def shutdown(self) -> None:
        """Give memory and process groups back; every rank calls it, and nothing else afterwards."""
        self.core.sleep(level=2)
        self.parallel.destroy()

    def _group(self, index: int, prompt: PromptType, params: SamplingParams) -> PromptGroup:
        fields: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
        text: str | None = fields.get("prompt")
        if "prompt_token_ids" in fields:
            tokens = [int(token) for token in fields["prompt_token_ids"]]
        elif text is None:
            raise ValueError(f"prompt {index} has keys {list(fields)}, expected 'prompt' or 'prompt_token_ids'")
        elif self.tokenizer is None:
            raise ValueError(f"prompt {index} is text, but the engine has no tokenizer (skip_tokenizer_init=True)")
        else:
            tokens = self.tokenizer.encode(text)
        return PromptGroup(str(index), text, tokens, params, self.config.model.hf.eos_token_ids)

    def _decoder(self, params: SamplingParams) -> Any:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)


def _local_rank(rank: int, platform: Platform) -> int:
    """This process's device: the launcher's LOCAL_RANK, else by rank over the visible devices."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return rank % max(1, platform.num_devices())
