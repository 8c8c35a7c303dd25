"""The vLLM engine inside every worker process (SPMD): DataProto in, DataProto out."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.experimental.agent_loop.host import HostSettings
from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.workers.config import RolloutConfig
from verl.workers.rollout.environment_host import EnvironmentHost
from verl.workers.rollout.rollout_messages import DRAFTS, ENVIRONMENT_SEED, PROMPT_LENGTH, TURNS
from verl.workers.rollout.trajectory import Trajectory
from verl.workers.rollout.vllm_rollout.turns import TurnSource
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.rank_shards import RankShards, engine_shards
from vllm.model_executor.model_loader.shard_writer import ShardWriter
from vllm.ops.contract import RolloutOps
from vllm.platforms import Platform
from vllm.sampling_params import SMALLEST_TEMPERATURE
from vllm.transformers_utils.config import load_config
from vllm.v1.request import Request
from vllm.v1.sample.rng import derive_seed

logger = logging.getLogger(__name__)


class vLLMRollout:
    """One data-parallel replica's share of the rollout; tensor-parallel ranks of a replica get the same rows.

    The weights are those that the trainer sends. It holds device memory only between ``resume`` and ``release``.

    Args:
        first_rank: the ranks before it have no engine.
        environments: of samples of several turns.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        *,
        rollout_ops: str | RolloutOps,
        device: torch.device | Platform,
        first_rank: int = 0,
        environments: HostSettings | None = None,
    ) -> None:
        self.config = config
        for sampling in (config, config.val_kwargs):  # ValueError for what cannot be sampled by
            SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
        arguments = _engine_arguments(config, model_path, torch.distributed.get_world_size() - first_rank)
        kind = device if isinstance(device, Platform) else device.type
        self.inference_engine = LLM(**arguments, rollout_ops=rollout_ops, device=kind, first_rank=first_rank)
        self.turns = self._host = None
        self._num_sources = itertools.count()
        if environments is not None:
            engine = self.inference_engine
            if engine.parallel.tp.rank_in_group == 0:
                ends = sorted(engine.engine.processor.end_token_ids)
                self._host = EnvironmentHost(replace(environments, end_ids=ends))
            self.turns = self.new_turns()
        self.release()

    def resume(self, tags: list[str]) -> None:
        """Allocates ``weights`` (empty, to be written by ``update_weight_shards``) and/or ``kv_cache``."""
        self.inference_engine.wake_up(tags=tags)

    def rank_shards(self, rank: int) -> RankShards:
        """HF name -> what the engine of ``rank`` owns of it; every rank knows that of all ranks."""
        return self.inference_engine.rank_shards(rank)

    def update_weight_shards(self, version: int) -> AbstractContextManager[ShardWriter]:
        """As ``LLM.update_weight_shards``."""
        return self.inference_engine.update_weight_shards(version)

    def shard_digests(self) -> dict[str, WeightDigest]:
        """HF name -> digest of this rank's shard as it is in memory now."""
        return self.inference_engine.shard_digests()

    def release(self) -> None:
        """Frees the KV cache and the weights."""
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
            [B, R]. With ``multi_turn.on_changed_history=split`` also row_starts [B, R]: where a new row of a sample
            begins, 1 + the tokens of the row before it that it begins with, else 0. For training with
            ``enable_rollout_routing_replay`` also routed_experts [B, P + R, MoE layers, K] of a small integer type,
            zero where a token was not computed: padding, and the last one of each row.
        """
        columns, engine = prompts.non_tensor_batch, self.inference_engine.engine
        seeds = columns["sampling_seeds"]
        limits = columns.get("response_limit", np.zeros(len(seeds), dtype=object))
        if self.turns is not None:
            self.turns.meta_info = prompts.meta_info
            rows = (columns["raw_prompt_ids"], seeds, limits, columns[ENVIRONMENT_ROW], columns[ENVIRONMENT_SEED])
            for number, (ids, seed, limit, row, row_seed) in enumerate(zip(*rows, strict=True)):
                self.turns.begin(self.trajectory(f"{number:08}", ids, int(seed), int(limit), row, int(row_seed)))
            engine.run_requests([], source=self.turns)
            ended = sorted(self.turns.take_ended(), key=lambda sample: sample.request_id)
            return self.to_batch(ended, prompts.meta_info)
        requests = [
            self.request(str(row), ids, int(seed), int(limit), prompts.meta_info)
            for row, (ids, seed, limit) in enumerate(zip(columns["raw_prompt_ids"], seeds, limits, strict=True))
        ]
        engine.run_requests(requests)
        return self.to_batch(requests, prompts.meta_info)

    def request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        seed: int,
        response_limit: int,
        meta_info: dict[str, Any],
        priority: int = 0,
    ) -> Request:
        """One row for the engine; ``response_limit`` and ``meta_info`` as in ``generate_sequences``."""
        config, engine = self.config, self.inference_engine
        is_validation = bool(meta_info.get("validate", False))
        chosen = config.val_kwargs if is_validation else config
        do_sample = bool(meta_info.get("do_sample", config.val_kwargs.do_sample if is_validation else True))
        is_greedy = not do_sample or chosen.temperature < SMALLEST_TEMPERATURE
        room = engine.config.model.max_model_len - len(prompt_token_ids)
        end_ids = () if config.ignore_eos else (int(meta_info["eos_token_id"]), *engine.engine.processor.end_token_ids)
        return Request(
            request_id,
            list(prompt_token_ids),
            max_tokens=min(response_limit or config.response_length, config.response_length, room),
            seed=seed,
            temperature=0.0 if is_greedy else chosen.temperature,
            top_k=0 if is_greedy else chosen.top_k,
            top_p=1.0 if is_greedy else chosen.top_p,
            stop_ids=frozenset(end_ids),
            priority=priority,
        )

    def trajectory(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        seed: int,
        response_limit: int,
        row: dict[str, Any],
        environment_seed: int,
        priority: int = 0,
    ) -> Trajectory:
        """One row as a sample of several turns, which begins with ``row``; the rest as in ``request``."""
        limit = min(response_limit or self.config.response_length, self.config.response_length)
        return Trajectory(request_id, seed, limit, list(prompt_token_ids), priority, row, environment_seed)

    def to_batch(self, samples: Sequence[Request | Trajectory], meta_info: dict[str, Any]) -> DataProto:
        """The rows of finished ``samples`` with the columns of ``generate_sequences``."""
        length, pad = self.config.response_length, int(meta_info["pad_token_id"])
        responses = _right_padded([sample.output_token_ids for sample in samples], length, pad, torch.int64)
        lengths = torch.tensor([sample.num_output_tokens for sample in samples])
        is_response = response_mask = (torch.arange(length) < lengths[:, None]).long()
        of_turns = [sample for sample in samples if isinstance(sample, Trajectory)]
        if of_turns:
            response_mask = _right_padded([sample.is_sampled for sample in of_turns], length, 0, torch.int64)

        raw_ids = [sample.token_ids[: sample.num_prompt_tokens] for sample in samples]
        prompt_lengths = torch.tensor([len(ids) for ids in raw_ids])
        prompt_ids = _left_padded(raw_ids, self.config.prompt_length, pad)
        prompt_mask = (
            torch.arange(self.config.prompt_length) >= self.config.prompt_length - prompt_lengths[:, None]
        ).long()
        tensors = {
            "responses": responses,
            "input_ids": torch.cat([prompt_ids, responses], dim=-1),
            "attention_mask": torch.cat([prompt_mask, is_response], dim=-1),
            "response_mask": response_mask,
        }
        if self.config.calculate_log_probs:
            log_probs = [sample.output_logprobs for sample in samples]
            tensors["rollout_log_probs"] = _right_padded(log_probs, length, 0.0, torch.float32)
        if self.config.enable_rollout_routing_replay and not meta_info.get("validate", False):
            tensors["routed_experts"] = _routed_experts(samples, self.config.prompt_length, length)
        num_kept = torch.zeros(len(samples), dtype=torch.int64)
        if self.config.multi_turn.splits:
            tensors["row_starts"] = torch.zeros_like(response_mask)
            for row, sample in enumerate(of_turns):
                for start, kept in sample.row_starts:
                    tensors["row_starts"][row, start] = 1 + kept
                    num_kept[row] += kept
        columns = {"finish_reason": as_rows([sample.finish_reason for sample in samples])}
        if self.config.speculative_config:
            columns[DRAFTS] = as_rows([sample.draft_counts for sample in samples])
        if of_turns:
            columns |= {
                TURNS: as_rows([sample.record() for sample in of_turns]),
                PROMPT_LENGTH: as_rows((prompt_lengths + num_kept).tolist()),
            }
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def new_turns(self) -> TurnSource | None:
        """A source of the next turns of samples, which no other source knows; None where a sample is one turn."""
        if not self.config.multi_turn.enable:
            return None
        engine, in_order = self.inference_engine, self.config.multi_turn.fixed_order
        tp, device, length = engine.parallel.tp, engine.core.device, self.config.prompt_length
        channel = str(next(self._num_sources))
        return TurnSource(self._host, channel, tp, device, self._next_turn, length, in_order=in_order)

    def _next_turn(self, sample: Trajectory, meta_info: dict[str, Any]) -> Request:
        number = len(sample.spans)
        # The cache of what has begun is still there.
        priority = sample.priority - (number > 0)
        # A draw depends on the seed and on how many tokens of its request are sampled: turns need seeds of their own.
        seed = derive_seed(sample.seed, number) if number else sample.seed
        name = f"{sample.request_id}.{number}"
        return self.request(name, sample.context, seed, sample.num_left, meta_info, priority)


def all_rank_shards(
    config: RolloutConfig,
    model_path: str,
    num_ranks: int,
    of_rank: Callable[[VllmConfig, int], RankShards] = engine_shards,
) -> dict[int, RankShards]:
    """What each of the ``num_ranks`` ranks of an engine owns, computed without an engine; ranks count from 0."""
    arguments = _engine_arguments(config, model_path, num_ranks)
    engine = EngineArgs(**arguments).create_engine_config(0, num_ranks)
    return {rank: of_rank(engine, rank) for rank in range(num_ranks)}


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


def _routed_experts(samples: Sequence[Request | Trajectory], num_columns: int, response_length: int) -> Tensor:
    """[B, P + R, M, K]: each row's choices begin at the column of its first prompt token."""
    rows = [sample.routed_experts for sample in samples]
    first = next((row for row in rows if row is not None), None)
    assert first is not None, "the engine returns no choices"
    choices_BLMK = torch.zeros(
        (len(rows), num_columns + response_length, *first.shape[1:]), dtype=torch.from_numpy(first).dtype
    )
    for row, (chosen, sample) in enumerate(zip(rows, samples, strict=True)):
        if chosen is not None:  # else its environment did not begin
            start = num_columns - sample.num_prompt_tokens
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
