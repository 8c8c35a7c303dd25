"""LLM: the engine as a Python object, one per process under an external launcher."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from vllm.config import WeightTransferConfig
from vllm.distributed.parallel_state import init_model_parallel
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.engine.arg_utils import EngineArgs, engine_error, unknown_arguments, without_none
from vllm.engine.client_args import take_client_args
from vllm.entrypoints.chat_utils import Message, conversation_prompt
from vllm.entrypoints.progress import progress
from vllm.entrypoints.sampling_defaults import sampling_defaults
from vllm.inputs import PromptType, TokensPrompt
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.rank_shards import RankShards, engine_shards
from vllm.model_executor.model_loader.shard_writer import ShardWriter
from vllm.ops.contract import RolloutOps, resolve
from vllm.outputs import RequestOutput
from vllm.platforms import Platform, resolve_platform
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.tokenizer import LazyTokenizer
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.llm_engine import LLMEngine, StepLimits
from vllm.v1.engine.output_processor import PromptGroup, prompt_of
from vllm.v1.request import Request
from vllm.v1.worker.rank_context import RankContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SLEEP_TAGS = ("weights", "kv_cache")


class LLM:
    """An engine for a Hugging Face model directory.

    With several processes the caller initialises torch.distributed, and every process builds an LLM with the same
    arguments: rank = tp + TP * (dp + DP * instance). The TP ranks of a replica call `generate` with the same prompts,
    replicas with different ones. Replicas that share experts (enable_expert_parallel) or move requests between them
    (rebalance_interval) must all call it, with an empty list if they have no prompts.

    Args:
        model: the directory.
        rollout_ops: an op table, or its provider "module:function"; None: the platform's.
        device: a platform or its name; None: what this machine has.
        first_rank: the first torch.distributed rank that has an engine; the layout counts from it.
        generation_config: where calls without SamplingParams have theirs from: "auto" (the model's
            generation_config.json), "vllm" (no file) or a directory.
        override_generation_config: values that count before those of the file.
        weight_transfer_config: "ipc" takes weights from a trainer in another process on the same device.
        tensor_parallel_size, ...: the other fields of `EngineArgs`. Further arguments of vLLM's that mean nothing here
            are listed once in the log, or refused by the feature that is missing (`vllm.engine.client_args`).
    """

    def __init__(
        self,
        model: str,
        *,
        rollout_ops: str | RolloutOps | None = None,
        device: str | Platform | None = None,
        first_rank: int = 0,
        generation_config: str = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        weight_transfer_config: WeightTransferConfig | Mapping[str, Any] | None = None,
        **engine_args: Any,
    ) -> None:
        kept, notes, refused = take_client_args(engine_args)
        refused += unknown_arguments(kept)
        if refused:
            raise engine_error(refused)
        args = EngineArgs(
            model,
            rollout_ops=rollout_ops if isinstance(rollout_ops, str) else None,
            device=device.name if isinstance(device, Platform) else device,
            **without_none(kept),
        )
        if notes:
            logger.info("taken without effect:\n  %s", "\n  ".join(notes))
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        platform = device if isinstance(device, Platform) else resolve_platform(args.device)
        config = args.create_engine_config(
            rank - first_rank, world_size - first_rank, first_rank, platform.default_capture_sizes
        )
        ops = rollout_ops if isinstance(rollout_ops, RolloutOps) else None
        ops = ops or resolve(config.rollout_ops or platform.rollout_ops)
        self.config = platform.with_graphs_decided(config, ops)
        if isinstance(weight_transfer_config, Mapping):
            weight_transfer_config = WeightTransferConfig(**weight_transfer_config)
        problems = platform.config_problems(self.config, ops)
        problems += weight_transfer_config.problems() if weight_transfer_config else []
        if problems:
            raise engine_error(problems)
        self._tokenizer: LazyTokenizer | None = None
        if not self.config.model.skip_tokenizer_init:
            self._tokenizer = LazyTokenizer(self.config.model.tokenizer)
        logger.info("rollout ops on %s: %s", platform.name, ops.implementations)
        self.parallel = init_model_parallel(self.config.parallel, platform.group_options, platform.has_reduce_scatter)
        own_device = platform.device(_local_rank(rank, platform))
        self._weight_transfer = IPCWeightTransferEngine(platform, own_device) if weight_transfer_config else None
        self.core = EngineCore(RankContext(self.config, self.parallel, platform, ops, own_device))
        self.engine = LLMEngine(self.config, self.core, self._tokenizer)
        self._request_counter = itertools.count()
        self._defaults = sampling_defaults(model, generation_config, override_generation_config)

    def generate(
        self,
        prompts: PromptType | RequestOutput | Sequence[PromptType | RequestOutput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        priority: Sequence[int] | None = None,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per prompt, in order; every sample runs to its end or to a limit.

        Waiting prompts with a lower `priority` run first. After `max_steps` engine steps or `max_seconds` unfinished
        samples are returned as they are, with finish_reason "abort" and RequestOutput.finished False. Such an output
        can be passed as a prompt to a later call, here or in another engine of the model: it then continues with its
        own sampling parameters and the weights of that call. `on_output` is called with each prompt's output as soon as
        its samples have finished. Ranks that step together must be given the same limits.

        ValueError lists all prompts that cannot be run (index, length, limit); RuntimeError while the engine sleeps.
        `use_tqdm` shows a bar of finished prompts on a terminal; or is called like tqdm to make one.
        """
        if lora_request is not None:
            raise ValueError("lora_request: LoRA adapters are not supported; merge the adapter into the weights first")
        prompt_list = [prompts] if isinstance(prompts, (str, dict, RequestOutput)) else list(prompts)
        count = len(prompt_list)
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        param_list = [params] * count if isinstance(params, SamplingParams) else list(params)
        priorities = [0] * count if priority is None else list(priority)
        for name, values in (("sampling_params", param_list), ("priority", priorities)):
            if len(values) != count:
                raise ValueError(f"{count} prompts came with {len(values)} {name}, expected as many")
        groups = [
            self._group(f"prompt {index}", *settings)
            for index, settings in enumerate(zip(prompt_list, param_list, priorities, strict=True))
        ]
        self.engine.require_idle()
        requests, limits = self.engine.processor.samples(groups, priorities), StepLimits(max_steps, max_seconds)
        by_id = {group.request_id: group for group in groups}
        outputs: dict[str, RequestOutput] = {}

        def build(group: PromptGroup) -> None:
            output = outputs[group.request_id] = group.output(self.engine.processor.decoder(group.params))
            if output.finished and bar is not None:
                bar.update(1)
            if output.finished and on_output is not None:
                on_output(output)

        def on_finished(request: Request) -> None:
            group = by_id.get(prompt_of(request.request_id))  # None: of another replica
            if group is not None and group.is_finished and group.request_id not in outputs:
                build(group)

        with progress(use_tqdm, count) as bar:
            self.engine.run_requests(requests, limits, on_finished)
            for group in groups:
                if group.request_id not in outputs:  # it was cut, or has finished on another replica
                    build(group)
        return [outputs[group.request_id] for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return one RequestOutput per conversation, a list of messages with role and content; or for a single one.

        Conversations are rendered by `chat_template`, else the tokenizer's own, which may show the model `tools`, as
        OpenAI's function schemas. Templates get contents as text, whatever `chat_template_content_format` says.
        ValueError without a template, for messages that it refuses, or with skip_tokenizer_init.
        """
        shown = {} if tools is None else {"tools": list(tools)}
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_single else messages
        tokenizer = self.get_tokenizer()
        prompts: list[PromptType] = []
        for conversation in conversations:
            text = conversation_prompt(
                tokenizer,
                conversation,
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **shown | dict(chat_template_kwargs or {}),
            )
            # The template writes the special tokens itself.
            prompts.append(TokensPrompt(prompt_token_ids=tokenizer.encode(text, add_special_tokens=False)))
        return self.generate(prompts, sampling_params, use_tqdm, lora_request)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls that are given none."""
        return self._defaults.sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as loading weights does too; RuntimeError while requests run."""
        self.core.idle_worker("reset_prefix_cache")

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Free "weights" and "kv_cache", or those of them in `tags`. Level 1 keeps the weights on the host.

        Level 2 drops the weights: new ones must be loaded.
        """
        if not self.config.enable_sleep_mode:
            raise RuntimeError("sleep: the engine was built with enable_sleep_mode=False")
        if level not in (1, 2):
            raise ValueError(f"sleep level {level} is unknown, expected 1 (keep weights on the host) or 2 (drop them)")
        known = _known_tags("sleep", tags)
        self.core.idle_worker("sleep").sleep(level, known)
        self.core.platform.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back "weights" (empty buffers after level 2) and "kv_cache" (the same block count); None means both."""
        known = _known_tags("wake_up", tags)
        if "weights" in known:
            self.core.worker.weights.allocate()
        if "kv_cache" in known:
            self.core.worker.cache.allocate()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (hf_name, full tensor) pairs, all of the model or a part, in any order; returns the loaded names.

        ValueError for an unknown name or a wrong shape; multi-token-prediction layers are skipped. The prefix cache is
        reset.
        """
        return self.core.idle_worker("load_weights").weights.load(weights)

    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | WeightTransferUpdateRequest | Mapping[str, Any],
        version: int | None = None,
    ) -> None:
        """Replace all weights by the (hf_name, full tensor) pairs of a policy version (None: the next one).

        Each tensor is copied as it arrives, so the stream may reuse its buffers. ValueError for a name that is unknown,
        repeated or missing, or a wrong shape; until an update is complete, `generate` raises RuntimeError.

        A request, or a mapping with its "update_info", has handles of a trainer's memory instead
        (`weight_transfer_config`), which the trainer may change again afterwards; between `start_weight_update` and
        `finish_weight_update` some of the weights.
        """
        if isinstance(weights, (WeightTransferUpdateRequest, Mapping)):
            self._receive_weights(weights, version)
            return
        self.core.idle_worker("update_weights").weights.update(weights)
        self.core.set_policy_version(version)

    def init_weight_transfer_engine(self, request: WeightTransferInitRequest | Mapping[str, Any] | None = None) -> None:
        """vLLM's call before the first transfer; the backend "ipc" needs none."""
        self._transfer_engine()

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update whose weights come in several `update_weights` calls with handles."""
        transfer = self._transfer_engine()
        if not is_checkpoint_format:
            raise ValueError(
                "is_checkpoint_format=False: weights have the names and shapes of a Hugging Face checkpoint"
            )
        self.core.idle_worker("start_weight_update").weights.start_update()
        transfer.is_updating = True

    def finish_weight_update(self, weight_version: int | None = None) -> None:
        """End the update of a policy version (None: the next one); ValueError naming the weights that have not come."""
        transfer = self._transfer_engine()
        if not transfer.is_updating:
            raise RuntimeError("finish_weight_update without start_weight_update")
        transfer.is_updating = False
        self.core.idle_worker("finish_weight_update").weights.check_loaded()
        self.core.set_policy_version(weight_version)

    def _receive_weights(self, request: WeightTransferUpdateRequest | Mapping[str, Any], version: int | None) -> None:
        transfer, memory = self._transfer_engine(), self.core.idle_worker("update_weights").weights
        if isinstance(request, Mapping):
            request = WeightTransferUpdateRequest(**request)
        weights = transfer.tensors(request.update_info)
        try:
            (memory.load if transfer.is_updating else memory.update)(weights)
        finally:
            self.core.platform.synchronize()  # the copies read the trainer's memory
        if not transfer.is_updating:
            self.core.set_policy_version(version)

    def _transfer_engine(self) -> IPCWeightTransferEngine:
        if self._weight_transfer is None:
            raise ValueError('no weight transfer: build the LLM with weight_transfer_config={"backend": "ipc"}')
        return self._weight_transfer

    @contextmanager
    def update_weight_shards(self, version: int | None = None) -> Iterator[ShardWriter]:
        """A context in which all shards that this rank owns (`rank_shards`) are replaced by those of a policy version
        (None: the next one): its `write` copies values, cut and ordered in any way, to their places.

        ValueError for elements that this rank does not own, that come twice or, at the end, not at all; `generate`
        refuses until an update is complete. Afterwards `ShardWriter.digests` are what `shard_digests` would return;
        each was taken from the memory of the shard when all of it was written.
        """
        with self.core.idle_worker("update_weight_shards").weights.update_shards() as writer:
            yield writer
        self.core.set_policy_version(version)

    def rank_shards(self, rank: int) -> RankShards:
        """Hugging Face name -> what rank `rank` of an engine like this one owns (as `ParallelConfig` counts ranks)."""
        return engine_shards(self.config, rank)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    @property
    def policy_version(self) -> int:
        """The version of the weights, as given to the last `update_weights`; 0 for the initial weights."""
        return self.core.policy_version

    def weights_digest(self) -> dict[str, WeightDigest]:
        """Hugging Face name -> digest of the whole tensor as this engine holds it, for comparison with a trainer's
        (`vllm.model_executor.model_loader.digest`). Weights held in FP8 are the two tensors of an FP8 checkpoint.

        Collective over the ranks of an instance; a rank's own copies are what it counts of tensors that others hold
        too.
        """
        return self.core.worker.weights.digests()

    def shard_digests(self) -> dict[str, WeightDigest]:
        """Hugging Face name -> digest of this rank's shard as it is in memory now; not collective."""
        return self.core.worker.weights.shard_digests()

    def check_weights_loaded(self) -> None:
        """ValueError naming every weight that has not come since a level-2 sleep.

        Call it after the last load_weights.
        """
        self.core.worker.weights.check_loaded()

    def get_memory_report(self) -> dict[str, int]:
        """Return the bytes of weights, host copies and KV cache, the number of KV blocks, and the device's free and
        total bytes.
        """
        return self.core.worker.memory_report()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; ValueError with skip_tokenizer_init, or when it cannot be read."""
        if self._tokenizer is None:
            raise ValueError("no tokenizer: the engine was built with skip_tokenizer_init=True")
        return self._tokenizer.load()

    def shutdown(self) -> None:
        """Free memory and process groups; every rank calls it, and nothing else afterwards."""
        self.core.idle_worker("shutdown").shutdown()
        self.core.platform.empty_cache()
        self.parallel.destroy()

    def _group(
        self, name: str, prompt: PromptType | RequestOutput, params: SamplingParams, priority: int
    ) -> PromptGroup:
        request_id = str(next(self._request_counter))
        if not isinstance(prompt, RequestOutput):
            return self.engine.processor.group(name, request_id, prompt, params)
        if prompt.resumable is None:
            raise ValueError(f"{name} is a finished RequestOutput, expected one that was cut before its end")
        return prompt.resumable.resumed(name, request_id, priority)


def _known_tags(action: str, tags: Sequence[str] | None) -> list[str]:
    unknown = [tag for tag in tags or () if tag not in SLEEP_TAGS]
    if unknown:
        raise ValueError(f"{action} tags {unknown} are unknown, expected some of {list(SLEEP_TAGS)}")
    return list(SLEEP_TAGS if tags is None else tags)


def _local_rank(rank: int, platform: Platform) -> int:
    """This process's device: the launcher's LOCAL_RANK, else by rank over the visible devices."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return rank % max(1, platform.num_devices())
