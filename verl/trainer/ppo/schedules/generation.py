"""Prompts as rows, and whole batches of responses to them: what every schedule needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol_storage import as_rows

REQUEST_KEYS = ("raw_prompt_ids", "sampling_seeds", "response_limit")  # columns that are sent to be generated for


@dataclass(frozen=True)
class Tokens:
    """What a rollout engine must know of the tokenizer."""

    eos_token_id: int
    pad_token_id: int

    def meta_info(self) -> dict[str, Any]:
        """For a request."""
        return {"eos_token_id": self.eos_token_id, "pad_token_id": self.pad_token_id}


def prompt_rows(prompts: dict[str, np.ndarray], uids: Sequence[str], n: int, seeds: np.ndarray) -> DataProto:
    """Each of the B prompts n times with its uid, and a sampling seed for each of the B n rows."""
    batch = DataProto.from_single_dict(prompts)
    batch.non_tensor_batch["uid"] = as_rows(uids)
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["sampling_seeds"] = seeds
    return batch


def generate(
    workers: Any, prompts: DataProto, tokens: Tokens, num_replicas: int, timing: dict[str, float], **meta_info: Any
) -> DataProto:
    """Responses to ``prompts``, whose token ids are taken out of it, and ``num_tokens`` int64 [B] of both."""
    request = prompts.pop(non_tensor_batch_keys=REQUEST_KEYS)
    request.meta_info |= meta_info | tokens.meta_info()
    request, num_pad = pad_dataproto_to_divisor(request, num_replicas)
    output = unpad_dataproto(workers.generate_sequences(request), num_pad)
    timing |= output.meta_info.pop("timing")
    add_num_tokens(output, request.non_tensor_batch["raw_prompt_ids"][: len(output)])
    return output


def add_num_tokens(output: DataProto, prompt_ids: Sequence[Sequence[int]] | np.ndarray) -> None:
    """``num_tokens`` int64 [B], of prompt and response."""
    num_prompt = torch.tensor([len(ids) for ids in prompt_ids])
    output.batch["num_tokens"] = num_prompt + output.batch["response_mask"].sum(-1)
