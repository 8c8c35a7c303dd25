"""The vLLM engine inside every worker process (SPMD): DataProto in, DataProto out."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import BaseRollout
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams, TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.rank_shards import RankShards, engine_shards
from vllm.model_executor.model_loader.shard_writer import ShardWriter
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.config import load_config

logger = logging.getLogger(__name__)


class vLLMRollout(BaseRollout):
    """One data-parallel replica's share of the rollout; tensor-parallel ranks of a replica get the same rows.

    Args:
        first_rank: the ranks before it have no engine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        rollout_ops: str | RolloutOps,
        device: torch.device | Platform,
        first_rank: int = 0,
    ) -> None:
        self.config = config
        arguments = _engine_arguments(config, model_path, torch.distributed.get_world_size() - first_rank)
        kind = device if isinstance(device, Platform) else device.type
        self.inference_engine = LLM(**arguments, rollout_ops=rollout_ops, device=kind, first_rank=first_rank)
        self.release()

    def resume(self, tags: list[str]) -> None:
        self.inference_engine.wake_up(tags=tags)

    def rank_shards(self, rank: int) -> RankShards:
        return self.inference_engine.rank_shards(rank)

    def update_weight_shards(self, version: int) -> AbstractContextManager[ShardWriter]:
        return self.inference_engine.update_weight_shards(version)

    def shard_digests(self) -> dict[str, WeightDigest]:
        return self.inference_engine.shard_digests()

    def release(self) -> None:
        self.inference_engine.sleep(level=2)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generates one response per row.

        Args:
            prompts: ``raw_prompt_ids`` (lists of ints) and ``sampling_seeds`` (ints) in ``non_tensor_batch``, and where
                rows have limits of their own ``response_limit`` (tokens, 0: the config's);
                ``eos_token_id``, ``pad_token_id`` and optionally ``validate`` and ``do_sample`` in ``meta_info``.

        Returns:
            What is trained on: input_ids and attention_mask [B, P + R], prompts left-padded and responses right-padded;
            responses and response_mask [B, R]; with ``calculate_log_probs`` rollout_log_probs (fp32, zero on padding)
            [B, R]. For training with ``enable_rollout_routing_replay`` also routed_experts [B, P + R, MoE layers, K] of
            a small integer type, zero where a token was not computed: padding, and the last one of each row.
        """
        seeds = prompts.non_tensor_batch["sampling_seeds"]
        requests = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts.non_tensor_batch["raw_prompt_ids"]]
        limits = prompts.non_tensor_batch.get("response_limit", np.zeros(len(seeds), dtype=object))
        params = [
            self.sampling_params(prompts.meta_info, int(seed), int(limit))
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        outputs = self.inference_engine.generate(requests, params, use_tqdm=False)
        return self.to_batch(outputs, prompts.meta_info)

    def sampling_params(self, meta_info: dict[str, Any], seed: int, response_limit: int = 0) -> SamplingParams:
        """How the row with this seed is sampled; ``meta_info`` and ``response_limit`` as in ``generate_sequences``."""
        config = self.config
        is_validation = bool(meta_info.get("validate", False))
        chosen = config.val_kwargs if is_validation else config
        do_sample = bool(meta_info.get("do_sample", config.val_kwargs.do_sample if is_validation else True))
        return SamplingParams(
            n=1,
            temperature=chosen.temperature if do_sample else 0.0,
            top_k=chosen.top_k if do_sample else -1,
            top_p=chosen.top_p if do_sample else 1.0,
            max_tokens=min(response_limit or config.response_length, config.response_length),
            stop_token_ids=[] if config.ignore_eos else [int(meta_info["eos_token_id"])],
            ignore_eos=config.ignore_eos,
            seed=seed,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def to_batch(self, outputs: list[RequestOutput], meta_info: dict[str, Any]) -> DataProto:
        """The rows of ``outputs``, one sample each, with the columns of ``generate_sequences``."""
        length, pad = self.config.response_length, int(meta_info["pad_token_id"])
        completions = [output.outputs[0] for output in outputs]
        responses = _right_padded([c.token_ids for c in completions], length, pad, torch.int64)
        lengths = torch.tensor([len(c.token_ids) for c in completions])
        response_mask = (torch.arange(length) < lengths[:, None]).long()

        raw_ids = [output.prompt_token_ids for output in outputs]
        prompt_lengths = torch.tensor([len(ids) for ids in raw_ids])
        prompt_ids = _left_padded(raw_ids, self.config.prompt_length, pad)
        prompt_mask = (
            torch.arange(self.config.prompt_length) >= self.config.prompt_length - prompt_lengths[:, None]
        ).long()
        tensors = {
            "responses": responses,
            "input_ids": torch.cat([prompt_ids, responses], dim=-1),
            "attention_mask": torch.cat([prompt_mask, response_mask], dim=-1),
            "response_mask": response_mask,
        }
        if self.config.calculate_log_probs:
            log_probs = [c.sampled_logprobs for c in completions]
            tensors["rollout_log_probs"] = _right_padded(log_probs, length, 0.0, torch.float32)
        if self.config.enable_rollout_routing_replay and not meta_info.get("validate", False):
            tensors["routed_experts"] = _routed_experts(
                completions, prompt_lengths.tolist(), self.config.prompt_length, length
            )
        reasons = np.array([c.finish_reason for c in completions], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors={"finish_reason": reasons})


def all_rank_shards(config: RolloutConfig, model_path: str, num_ranks: int) -> dict[int, RankShards]:
    """What each of the ``num_ranks`` ranks of an engine owns, computed without an engine; ranks count from 0."""
    arguments = _engine_arguments(config, model_path, num_ranks)
    engine = EngineArgs(**arguments).create_engine_config(0, num_ranks)
    return {rank: engine_shards(engine, rank) for rank in range(num_ranks)}


def _engine_arguments(config: RolloutConfig, model_path: str, num_ranks: int) -> dict[str, Any]:
    """The keys that the engine has under the same names, and those that differ."""
    same = {field.name for field in fields(config)} & {field.name for field in fields(EngineArgs)}
    has_experts = load_config(model_path).n_routed_experts > 0
    return {name: getattr(config, name) for name in same} | {
        "model": model_path,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "data_parallel_size": config.replicas_per_engine(num_ranks),
        "distributed_executor_backend": "external_launcher",
        "max_model_len": config.context_length,
        "enable_sleep_mode": True,
        "enforce_eager": config.enforce_eager or None,
        "enable_expert_parallel": config.enable_expert_parallel and has_experts,
        "enable_return_routed_experts": config.enable_rollout_routing_replay,
        "force_load_balancing": config.fix_router,
        "load_format": "dummy",
    }


def _routed_experts(
    completions: list[CompletionOutput], prompt_lengths: list[int], num_columns: int, response_length: int
) -> Tensor:
    """[B, P + R, M, K]: each row's choices begin at the column of its first prompt token."""
    rows = [c.routed_experts for c in completions if c.routed_experts is not None]
    assert len(rows) == len(completions), "the engine returns no choices"
    first = rows[0]
    choices_BLMK = torch.zeros(
        (len(rows), num_columns + response_length, *first.shape[1:]), dtype=torch.from_numpy(first).dtype
    )
    for row, (chosen, prompt_length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        start = num_columns - prompt_length
        choices_BLMK[row, start : start + len(chosen)] = torch.from_numpy(chosen)
    return choices_BLMK


def _left_padded(rows: list[list[int]], length: int, fill: int) -> Tensor:
    return _right_padded([row[::-1] for row in rows], length, fill, torch.int64).flip(-1)


def _right_padded(rows: list[list], length: int, fill: float, dtype: torch.dtype) -> Tensor:
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), length), fill, dtype=dtype)
    flat = torch.tensor([value for row in rows for value in row], dtype=dtype)
    padded[torch.arange(length) < lengths[:, None]] = flat
    return padded
