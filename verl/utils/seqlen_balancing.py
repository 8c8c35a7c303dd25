"""Micro-batches of at most so many tokens, and upstream's names of ``verl.utils.partitions``.

The trainer's own actor packs rows (``verl.workers.actor.megatron_actor.split_rows``); the functions on batches here are
for workers of the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.errors import BatchError
from verl.utils.partitions import (
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    partitions_within,
    split_to,
)

__all__ = [
    "calculate_workload",
    "ceildiv",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
]


def calculate_workload(seqlen_list: Sequence[int] | Tensor) -> Tensor:
    """24576 s + s^2 of each length s: the matrix products and the attention of a layer with 4,096 features."""
    lengths = torch.as_tensor(seqlen_list)
    return 24576 * lengths + lengths**2


def ceildiv(a: int, b: int) -> int:
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The least multiple of ``b`` that is not below ``a``."""
    return ceildiv(a, b) * b


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[TensorDict], list[list[int]]]:
    """(micro-batches, the rows of each) of at most ``max_token_len`` real tokens by ``attention_mask``.

    Args:
        batch: rows [B, ...].
        max_token_len: the limit, at least the longest row's tokens.
        dp_group: ranks that get the same number of micro-batches, with ``same_micro_num_in_dp``; collective over it.
        num_batches_divided_by: a divisor of that number.
        same_micro_num_in_dp: see ``dp_group``.
        min_num_micro_batch: the least number.
        use_dynamic_bsz_balance: the largest micro-batches stand in the middle, so that a pipeline fills and drains with
            small ones.

    Raises:
        ValueError: a row is longer than the limit, or there are fewer rows than micro-batches.
    """
    lengths = [int(length) for length in batch["attention_mask"].sum(-1)]
    if max(lengths) > max_token_len:
        raise BatchError(f"a row has {max(lengths)} tokens, more than max_token_len {max_token_len}")
    parts = partitions_within(lengths, max_token_len)
    count = max(len(parts), min_num_micro_batch or 1)
    if dist.is_initialized() and same_micro_num_in_dp and dp_group is not None:
        device = batch["attention_mask"].device if dist.get_backend(dp_group) != "gloo" else "cpu"
        counts = torch.tensor([count], device=device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=dp_group)
        count = int(counts)
    if num_batches_divided_by is not None:
        count = roundup_divisible(count, num_batches_divided_by)
    if count > len(lengths):
        raise BatchError(f"{len(lengths)} rows cannot fill {count} micro-batches")
    parts = [sorted(part) for part in split_to(parts, lengths, count)]
    loads = calculate_workload(lengths).tolist()
    parts.sort(key=lambda part: (sum(loads[row] for row in part), part), reverse=True)
    if use_dynamic_bsz_balance:
        parts = parts[::2][::-1] + parts[1::2]
    return [batch[part] for part in parts], parts


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The permutation that undoes ``idx_map``."""
    reverse = [0] * len(idx_map)
    for place, index in enumerate(idx_map):
        reverse[index] = place
    return reverse


def prepare_dynamic_batch(
    data: DataProto,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], list[list[int]]]:
    """``rearrange_micro_batches`` of a whole batch, objects and settings included."""
    _, parts = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    found = [data.select_idxs(part) for part in parts]
    for micro in found:
        micro.meta_info = copy.copy(data.meta_info)
    return found, parts


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Rows [B, ...] of the micro-batches, one after another, in the order of the batch."""
    order = list(chain.from_iterable(batch_idx_list))
    if len(order) != len(data):
        raise BatchError(f"{len(data)} rows, but the micro-batches have {len(order)}")
    return data[torch.tensor(get_reverse_idx(order))]
