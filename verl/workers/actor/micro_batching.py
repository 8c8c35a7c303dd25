"""Which rows of a batch go into which micro-batch, the same number on every data-parallel rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def split_rows(
    lengths_B: Tensor,
    *,
    micro_batch_size: int,
    max_token_len: int | None,
    dp_group: dist.ProcessGroup,
) -> list[list[int]]:
    """Row indices of each micro-batch.

    Args:
        lengths_B: tokens of every row, int64 [B].
        micro_batch_size: rows in a micro-batch when ``max_token_len`` is None.
        max_token_len: packed tokens a micro-batch may have; a longer row gets one of its own.
        dp_group: every rank of it gets the same number of micro-batches, because expert exchanges cross it.
            A rank with fewer rows ends with empty ones.
    """
    num_rows = lengths_B.numel()
    if max_token_len is None:
        chunks = [list(range(i, min(i + micro_batch_size, num_rows))) for i in range(0, num_rows, micro_batch_size)]
    else:
        # Enough micro-batches for the token budget even where balancing by length is imperfect.
        lengths = lengths_B.tolist()
        count = max(1, -(-sum(lengths) // max_token_len))
        while True:
            chunks = get_seqlen_balanced_partitions(lengths, count, equal_size=False) if num_rows else []
            too_long = (chunk for chunk in chunks if len(chunk) > 1 and sum(lengths[i] for i in chunk) > max_token_len)
            if next(too_long, None) is None or count >= num_rows:
                break
            count += 1
    wanted = _max_over(len(chunks), dp_group, lengths_B.device)
    if max_token_len is not None and len(chunks) < wanted <= num_rows:
        chunks = get_seqlen_balanced_partitions(lengths_B.tolist(), wanted, equal_size=False)
    return [sorted(chunk) for chunk in chunks] + [[] for _ in range(wanted - len(chunks))]


def _max_over(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    if group.size() == 1:
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest)
