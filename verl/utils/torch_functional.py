"""For plug-ins alone: masked statistics and padding of tensors (upstream: ``verl.utils.torch_functional``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl.utils.errors import BatchError, UnknownNameError
from verl.utils.masks import finite_outside, selected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "clip_by_value",
    "get_response_mask",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "tokenize_and_postprocess_data",
]


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """``x`` within bounds that are tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


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


def get_response_mask(response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """1 up to the first end token of each row, that token included, then 0; [B, R]."""
    ends = torch.tensor([eos_token] if isinstance(eos_token, int) else eos_token, device=response_id.device)
    is_end = torch.isin(response_id, ends).long()
    return (is_end.cumsum(1) - is_end == 0).to(dtype)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Lists of ids as a tensor, filled up on the right to the longest or to ``max_length``, whichever is more."""
    width = max(max((len(row) for row in response), default=0), max_length or 0)
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


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


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """(ids, mask) [1, max_length] of a text, without special tokens; see ``postprocess_data``."""
    found = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(found["input_ids"], found["attention_mask"], max_length, pad_token_id, left_pad, truncation)
