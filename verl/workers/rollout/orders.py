"""What the controller and a rollout replica tell each other in one call of a schedule with rollout ranks of its own."""

from __future__ import annotations

from dataclasses import dataclass

from verl.protocol import DataProto

PROMPT, SAMPLE, VERSIONS = "prompt_number", "sample_number", "policy_versions"  # columns of a row


@dataclass(frozen=True)
class RolloutOrder:
    """To one replica.

    Attributes:
        prompts: rows to begin, one sample each: ``raw_prompt_ids``, ``sampling_seeds``, ``response_limit``,
            ``prompt_number`` (lower goes first) and ``sample_number``; ``eos_token_id`` and ``pad_token_id`` in
            ``meta_info``. It may have no rows.
        max_steps: engine steps, the same for all replicas.
        kept_from: rows of generated batches with a lower number are needed no more.
    """

    prompts: DataProto
    max_steps: int
    kept_from: int = 0


@dataclass(frozen=True)
class RolloutAnswer:
    """Of one replica.

    Attributes:
        rows: samples that have ended: what ``RowStore.store_generated`` gives, ``prompt_number``, ``sample_number`` and
            ``policy_versions``, a list of [version, tokens drawn from it] in order. It may have no rows.
        seconds: that the call took.
    """

    rows: DataProto
    seconds: float
