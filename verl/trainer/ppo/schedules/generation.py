"""Prompts as rows, their sampling seeds, and the generation of responses to a batch of them, for every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import BY_RANK, DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol_storage import as_rows
from verl.utils.dataset.prompt_items import ENVIRONMENT_ROW
from verl.utils.masks import response_lengths
from verl.workers.rollout.rollout_messages import ENVIRONMENT_SEED, PROMPT_LENGTH
from vllm.v1.sample.rng import mixed

REQUEST_KEYS = ("raw_prompt_ids", "sampling_seeds", "response_limit")  # columns of a generation request
TURN_KEYS = (ENVIRONMENT_ROW, ENVIRONMENT_SEED)  # more of them, with samples of several turns


@dataclass(frozen=True)
class Tokens:
    """The special tokens that a rollout engine must know."""

    eos_token_id: int
    pad_token_id: int

    def meta_info(self) -> dict[str, Any]:
        return {"eos_token_id": self.eos_token_id, "pad_token_id": self.pad_token_id}


def prompt_rows(prompts: dict[str, Any], uids: Sequence[str], n: int, seeds: np.ndarray) -> DataProto:
    """Return each of the B prompts n times with its uid, and a sampling seed for each of the B n rows."""
    batch = DataProto.from_single_dict(prompts)
    batch.non_tensor_batch["uid"] = as_rows(uids)
    batch = batch.repeat(n, interleave=True)
    add_seeds(batch, n, seeds)
    return batch


def add_seeds(batch: DataProto, n: int, seeds: np.ndarray) -> None:
    """Adds the seeds of sampling [B n] and, with environments, theirs: one for all samples of a prompt."""
    batch.non_tensor_batch["sampling_seeds"] = seeds
    if ENVIRONMENT_ROW in batch.non_tensor_batch:
        batch.non_tensor_batch[ENVIRONMENT_SEED] = np.repeat(seeds[::n], n)


def generate(
    workers: Any, prompts: DataProto, tokens: Tokens, num_replicas: int, timing: dict[str, float], **meta_info: Any
) -> tuple[DataProto, dict[int, float]]:
    """Generates responses to ``prompts``, and takes their token ids out of it.

    Returns:
        The responses with ``num_tokens`` int64 [B] of prompt and response; and for the first rank of each replica the
        seconds that it generated.
    """
    request = prompts.pop(non_tensor_batch_keys=request_keys(prompts))
    request.meta_info |= meta_info | tokens.meta_info()
    request, num_pad = pad_dataproto_to_divisor(request, num_replicas)
    output = unpad_dataproto(workers.generate_sequences(request), num_pad)
    for name, seconds in output.meta_info.pop("timing").items():
        timing[name] = timing.get(name, 0.0) + seconds
    by_rank = output.meta_info.pop(BY_RANK, {})
    add_num_tokens(output, request.non_tensor_batch["raw_prompt_ids"][: len(output)])
    return output, {rank: figures["generate_sequences"] for rank, figures in by_rank.items()}


def request_keys(prompts: DataProto) -> list[str]:
    """The columns of ``prompts`` that a rollout engine is sent."""
    return [*REQUEST_KEYS, *(key for key in TURN_KEYS if key in prompts.non_tensor_batch)]


def validation_meta(is_greedy: bool) -> dict[str, bool]:
    """What ``generate`` needs to know when it validates: by ``val_kwargs``, or with the likeliest tokens instead."""
    return {"validate": True, **({"do_sample": False} if is_greedy else {})}


def add_num_tokens(output: DataProto, prompt_ids: Sequence[Sequence[int]] | np.ndarray) -> None:
    """Adds ``num_tokens`` int64 [B], the tokens of prompt and response; a prompt may be that of an environment."""
    lengths = [len(ids) for ids in prompt_ids]
    if PROMPT_LENGTH in output.non_tensor_batch:
        lengths = output.non_tensor_batch.pop(PROMPT_LENGTH).tolist()
    output.batch["num_tokens"] = torch.tensor(lengths) + response_lengths(output.batch["response_mask"])


def sampling_seeds(base: int, stream: int, first_row: int, num_rows: int) -> np.ndarray:
    """One seed per row, Python integers [num_rows] in [0, 2^63): a splitmix64 hash of (base, stream, row).

    ``stream`` is the global step for training and a negative number for validation, so that a resumed run, or one
    with another number of devices, samples what the original would have.
    """
    start = mixed(mixed(base) ^ (stream % 2**64))
    seeds = [mixed(start ^ row) >> 1 for row in range(first_row, first_row + num_rows)]
    return np.array(seeds, dtype=object)
