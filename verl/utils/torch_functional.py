"""Small functions on tensors: log-probs, masked statistics, padding (upstream: ``verl.utils.torch_functional``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from verl.utils.device import resolve_device
from verl.utils.errors import BatchError, UnknownNameError
from verl.utils.lr_schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)
from verl.utils.masks import finite_outside, selected

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "allgather_dict_tensors",
    "broadcast_dict_tensor",
    "check_device_is_available",
    "clip_by_value",
    "compute_grad_norm",
    "distributed_masked_mean",
    "distributed_mean_max_min_std",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "gather_from_labels",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "get_unpad_data",
    "get_wsd_schedule_with_warmup",
    "log_probs_from_logits_all_rmpad",
    "log_probs_from_logits_response",
    "log_probs_from_logits_response_rmpad",
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "post_process_logits",
    "postprocess_data",
    "remove_pad_token",
    "split_dict_tensor_into_batches",
    "tokenize_and_postprocess_data",
]


def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """``data[..., label]``: [..., V] and [...] give [...]."""
    return data.gather(-1, label[..., None])[..., 0]


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probs [...] of ``labels`` [...] under ``logits`` [..., V]; ``inplace_backward`` has no meaning here."""
    return logprobs_from_logits_v2(logits, labels)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    return gather_from_labels(logits.log_softmax(-1), labels)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """The same without log-probs of the whole vocabulary; half precision takes those, a row at a time."""
    if logits.dtype in (torch.float32, torch.float64):
        return gather_from_labels(logits, labels) - torch.logsumexp(logits, dim=-1)
    rows = [logprobs_from_logits_naive(row, label) for row, label in zip(logits, labels, strict=True)]
    return torch.stack(rows)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """``x`` within bounds that are tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropies [...] of the distributions [..., V]."""
    return torch.logsumexp(logits, dim=-1) - (logits.softmax(-1) * logits).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """The same in fp32 of [N, V], ``chunk_size`` rows at a time."""
    return torch.cat([entropy_from_logits(chunk.float()) for chunk in logits.split(chunk_size)])


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


def compute_grad_norm(model: nn.Module) -> float:
    """The sum of the squares of all gradients (upstream's value: without the root)."""
    return sum(float(p.grad.detach().square().sum()) for p in model.parameters() if p.grad is not None)


def broadcast_dict_tensor(tensors: Mapping[str, Tensor] | TensorDict, src: int, group: Any) -> None:
    """Overwrites every tensor, in the order of the names, with that of global rank ``src``."""
    named: dict[Any, Any] = dict(tensors.items())
    for key in sorted(named):
        dist.broadcast(named[key], src=src, group=group)


def allgather_dict_tensors(
    tensors: dict[str, Tensor] | TensorDict, size: int, group: Any, dim: int = 0
) -> dict[str, Tensor] | TensorDict:
    """The tensors of the ``size`` ranks of ``group``, joined along ``dim``; equal shapes on all of them."""
    found: dict[str, Tensor] = {}
    named: dict[Any, Any] = dict(tensors.items())
    for key in sorted(named):
        parts = [torch.empty_like(named[key]) for _ in range(size)]
        dist.all_gather(parts, named[key].contiguous(), group=group)
        found[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, TensorDict):
        return TensorDict(found, batch_size=tensors.batch_size[0] * size)
    return found


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Parts of ``batch_size`` rows each, which must divide the number of rows."""
    if tensors.batch_size[0] % batch_size:
        raise BatchError(f"{tensors.batch_size[0]} rows do not divide into batches of {batch_size}")
    return list(tensors.split(batch_size))


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


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The real tokens of every row."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs [B, R] of the last R = ``response_length`` of ``input_ids`` [B, S], under ``logits`` [B, S, V]."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """The same with logits [N, V] of the N real tokens alone; 0 where there is none."""
    indices, _, _ = get_unpad_data(attention_mask)
    ids_rmpad = input_ids.flatten()[indices][None]
    rows, length = input_ids.shape
    return log_probs_from_logits_all_rmpad(ids_rmpad, logits_rmpad, indices, rows, length, response_length)


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor,
    logits_rmpad: Tensor,
    indices: Tensor,
    batch_size: int,
    seqlen: int,
    response_length: int,
) -> Tensor:
    """The same with ids [1, N] of the real tokens, at ``indices`` [N] of the flattened [batch_size, seqlen]."""
    labels = input_ids_rmpad[0].roll(-1)
    found = logprobs_from_logits(logits_rmpad, labels)
    rows = found.new_zeros(batch_size * seqlen).index_put((indices,), found).view(batch_size, seqlen)
    return rows[:, -response_length - 1 : -1]


def post_process_logits(
    input_ids: Tensor, logits: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """``logits`` [..., V] over ``temperature``; -inf beyond the ``top_k`` highest and a mass of ``top_p``.

    ``input_ids`` are not read. A ``top_k`` below 1 and a ``top_p`` of 1 choose all, as None does.
    """
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is not None and 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    if top_p is not None and top_p < 1.0:
        values, order = logits.sort(dim=-1, descending=True)
        probs = values.softmax(-1)
        is_out = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs >= top_p)
        logits = logits.masked_fill(is_out, float("-inf"))
    return logits


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """(indices [N] of the real tokens in the flattened mask, cumulative lengths int32 [B + 1], the longest row)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero()[:, 0]
    return indices, nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


@contextmanager
def check_device_is_available() -> Iterator[None]:
    """RuntimeError before what is inside runs, if there is no accelerator."""
    if resolve_device("auto") == "cpu":
        raise RuntimeError("no accelerator is available to this process")
    yield


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(mean, maximum, minimum, unbiased deviation) over all ranks' elements; None what is not computed. Collective."""
    sums = torch.stack([local_tensor.sum(), local_tensor.new_tensor(float(local_tensor.numel()))])
    dist.all_reduce(sums)
    mean, count = sums[0] / sums[1], sums[1]
    largest = smallest = deviation = None
    if compute_max:
        largest = local_tensor.max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if compute_min:
        smallest = local_tensor.min()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    if compute_std:
        squares = (local_tensor - mean).square().sum()
        dist.all_reduce(squares)
        deviation = (squares / (count - 1)).sqrt()
    return mean, largest, smallest, deviation


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """The mean over all ranks' elements where the mask is not 0; 0 without any. Collective."""
    sums = torch.stack(
        [(selected(local_tensor, local_mask) * local_mask).sum(), local_mask.sum().to(local_tensor.dtype)]
    )
    dist.all_reduce(sums)
    return sums[0] / sums[1].clamp(min=1e-8)
