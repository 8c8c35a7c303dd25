"""Packed rows and padded ones (upstream: ``verl.utils.attention_utils``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.utils.errors import MissingModuleError
from verl.utils.import_utils import load_provider
from verl.utils.torch_functional import get_unpad_data

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` [N] of a tensor [T, ...], with its gradient."""
    return tensor.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of [B, S, ...] that ``attention_mask`` or ``unused_mask`` [B, S] chooses, one row after the other.

    Returns:
        (tokens [N, ...], their indices [N] in [B * S], cumulative lengths int32 [B + 1], the longest row, tokens of
        ``attention_mask`` in each row int32 [B]).
    """
    chosen = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, ends, longest = get_unpad_data(chosen)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, ends, longest, attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of ``unpad_input``: tokens [N, ...] in [batch, seqlen, ...], with zeros where there are none."""
    rows = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return rows.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def rearrange(*args: Any, **kwargs: Any) -> Any:
    """``einops.rearrange``; an ImportError where einops is not installed."""
    try:
        function = load_provider("einops:rearrange")
    except ValueError as error:
        raise MissingModuleError("rearrange is of the package einops: pip install einops") from error
    return function(*args, **kwargs)
