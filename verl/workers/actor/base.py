"""The interface of a policy for the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from verl.protocol import DataProto


class BasePPOActor(ABC):
    """A policy that scores given responses and learns from them."""

    @abstractmethod
    def compute_log_prob(
        self, data: DataProto, *, micro_batch_size: int | None = None, max_token_len: int | None = None
    ) -> Tensor | None:
        """Log-probs of the response tokens, fp32 [B, R], zero where ``response_mask`` is; None off the last stage."""

    @abstractmethod
    def update_policy(self, data: DataProto) -> dict[str, float]:
        """One pass of ``ppo_epochs`` over the rows; returns metrics under verl's names."""
