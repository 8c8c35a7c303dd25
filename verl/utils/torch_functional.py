"""For plug-ins alone: masked statistics and padding of tensors (upstream: ``verl.utils.torch_functional``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl.utils.errors import BatchError, UnknownNameError
from verl.utils.masks import finite_outside, selected


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """The sum where ``mask`` is not 0; values elsewhere may be NaN."""
    chosen = selected(values, mask) * mask
    return chosen.sum() if axis is None else chosen.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    count = mask.sum() if axis is None else mask.sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """The variance where ``mask`` is not 0.

    Raises:
        ValueError: the mask is empty, or has a single element and ``unbiased`` is set.
    """
    values = selected(values, mask)
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"the mask has {int(count)} elements; an unbiased variance needs two")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``values`` over their deviation where ``mask`` is not 0, less their mean with ``shift_mean``."""
    values = finite_outside(values, mask)
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """``tensors`` [..., S], filled up to [..., max_seq_len]; as they are where they are not shorter."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return nn.functional.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, S] as [B, max_length]: filled up, or cut as ``truncation`` says.

    ``left`` keeps the end, ``right`` the start, ``middle`` both halves; ``error`` is a ValueError.
    """
    if input_ids.ndim != 2:
        raise BatchError(f"input_ids of shape {tuple(input_ids.shape)}, expected [B, S]")
    length = input_ids.shape[-1]
    if truncation not in ("left", "right", "middle", "error"):
        raise BatchError(f"truncation is {truncation!r}; expected left, right, middle or error")
    if length < max_length:
        pad = [(input_ids, pad_token_id), (attention_mask, 0)]
        ids, mask = (pad_sequence_to_length(values, max_length, fill, left_pad) for values, fill in pad)
        return ids, mask
    if length == max_length:
        return input_ids, attention_mask
    head = max_length // 2
    cut = {
        "left": torch.arange(length - max_length, length),
        "right": torch.arange(max_length),
        "middle": torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)]),
    }
    if truncation == "error":
        raise UnknownNameError(
            f"{length} tokens are more than max_length {max_length}; cut them with another truncation"
        )
    columns = cut[truncation].to(input_ids.device)
    return input_ids[..., columns], attention_mask[..., columns]
