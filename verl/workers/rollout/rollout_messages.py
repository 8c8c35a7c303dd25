"""The request and the result of one call of a rollout replica, in schedules with rollout ranks of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from verl.protocol import DataProto
from vllm.v1.request import Request

PROMPT, SAMPLE, VERSIONS = "prompt_number", "sample_number", "policy_versions"  # columns of a row
# Columns of samples of several turns, beside ``prompt_items.ENVIRONMENT_ROW``.
ENVIRONMENT_SEED, PROMPT_LENGTH, TURNS = "environment_seed", "prompt_length", "turns"
DRAFTS = "drafts"  # column with speculation: ``Request.draft_counts``


UnfinishedSample: TypeAlias = Request | dict[str, Any]
"""A request, or with several turns what ``Trajectory.state`` says."""


def prompt_of(sample: UnfinishedSample) -> int:
    """The number of an unfinished sample's prompt, with which its name begins."""
    return int((sample.request_id if isinstance(sample, Request) else str(sample["request_id"])).split(".")[0])


@dataclass(frozen=True)
class RolloutRequest:
    """What one replica is to do.

    Attributes:
        prompts: rows to start, one sample each: ``raw_prompt_ids``, ``sampling_seeds``, ``response_limit``,
            ``prompt_number`` (lower numbers run first) and ``sample_number``; ``eos_token_id`` and ``pad_token_id`` in
            ``meta_info``. It may have no rows.
        max_steps: engine steps, the same for all replicas.
        first_needed_batch: stored rows of generated batches with a lower number are no longer needed.
    """

    prompts: DataProto
    max_steps: int
    first_needed_batch: int = 0


@dataclass(frozen=True)
class RolloutResult:
    """What one replica has finished.

    Attributes:
        rows: the finished samples: the result of ``RowStore.store_generated`` with ``prompt_number``, ``sample_number``
            and ``policy_versions``, a list of [version, tokens sampled with it] in order. It may have no rows.
        seconds: the duration of the call.
        num_tokens: (``prompt_number``, ``sample_number``) -> tokens behind the prompt by now, of finished and
            unfinished samples.
    """

    rows: DataProto
    seconds: float
    num_tokens: dict[tuple[int, int], int]
