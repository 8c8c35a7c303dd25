"""The graders' results as columns of the batch."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto
from verl.protocol_storage import as_rows
from verl.utils.masks import response_lengths
from verl.workers.config import OverlongBufferConfig
from verl.workers.reward_manager import Scores
from verl.workers.reward_manager.dapo import overlong_penalty

REWARD_PARTS = "reward_parts"


def add_scores(batch: DataProto, scores: Scores, buffer: OverlongBufferConfig) -> None:
    """Adds ``token_level_scores`` [B, R] and, per row, the parts of the reward by name.

    With an overlong buffer its penalty is added on the last token; the part ``score`` stays the grader's.
    """
    parts, token_scores = dict(scores.parts), scores.token_level_scores
    if buffer.enable:
        lengths = response_lengths(batch.batch["response_mask"])
        penalty = overlong_penalty(lengths, token_scores.shape[-1], buffer)
        token_scores = token_scores.clone()
        token_scores[torch.arange(len(batch)), (lengths - 1).clamp(min=0)] += penalty
        if buffer.log:
            parts |= {"overlong_reward": penalty.numpy(), "overlong": (penalty < 0).float().numpy()}
    batch.batch["token_level_scores"] = token_scores
    rows = [{name: float(values[row]) for name, values in parts.items()} for row in range(len(batch))]
    batch.non_tensor_batch[REWARD_PARTS] = as_rows(rows)


def reward_parts(batch: DataProto) -> dict[str, np.ndarray]:
    """Every part of the reward by name, float [B]; NaN where a row has none of that name."""
    rows = batch.non_tensor_batch[REWARD_PARTS]
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
