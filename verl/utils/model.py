"""For plug-ins alone: positions of a padded batch (upstream: ``verl.utils.model``)."""

from __future__ import annotations

from torch import Tensor


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Positions [B, S] that count the tokens of ``mask``, 0 on padding at the left."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
