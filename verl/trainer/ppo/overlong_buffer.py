"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from torch import Tensor

from verl.workers.config import OverlongBufferConfig


def overlong_penalty(lengths_B: Tensor, max_response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """Returns the penalty of each response, at most 0, fp32 [B]: ``penalty_factor`` times

    0 up to L_max - L_buffer tokens, then (L_max - L_buffer - length) / L_buffer, which is -1 at L_max. Longer ones,
    which the paper gives -1 as well, cannot be sampled.
    """
    excess_B = lengths_B.float() - (max_response_length - buffer.len)
    return -buffer.penalty_factor * (excess_B / buffer.len).clamp(min=0.0, max=1.0)
