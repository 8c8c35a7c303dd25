"""Splits the rows of a batch into micro-batches, the same number on every data-parallel rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, partitions_within, split_to


def split_rows(
    lengths_B: Tensor,
    *,
    micro_batch_size: int,
    max_token_len: int | None,
    dp_group: dist.ProcessGroup,
) -> list[list[int]]:
    """Row indices of each micro-batch, largest first, so that the i-th ones of all ranks have similar sizes.

    Args:
        lengths_B: packed tokens of every row, int64 [B].
        micro_batch_size: rows in a micro-batch when ``max_token_len`` is None.
        max_token_len: packed tokens a micro-batch may have; a longer row gets one of its own.
        dp_group: every rank of it gets the same number of micro-batches, because experts are shared across it. A rank
            with fewer rows gets empty ones at the end.
    """
    lengths = lengths_B.tolist()
    if max_token_len is not None:
        chunks = partitions_within(lengths, max_token_len)
    elif lengths and len(lengths) % micro_batch_size == 0:
        chunks = get_seqlen_balanced_partitions(lengths, len(lengths) // micro_batch_size, equal_size=True)
    else:
        rows = list(range(len(lengths)))
        chunks = [rows[first : first + micro_batch_size] for first in range(0, len(rows), micro_batch_size)]
    wanted = _max_over(len(chunks), dp_group, lengths_B.device)
    if max_token_len is not None:
        chunks = split_to(chunks, lengths, wanted)
    chunks.sort(key=lambda chunk: (-sum(lengths[row] for row in chunk), chunk))
    return chunks + [[] for _ in range(wanted - len(chunks))]


def _max_over(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    if group.size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)
