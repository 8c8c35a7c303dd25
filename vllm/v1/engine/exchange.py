"""Uneven all-to-all between the DP replicas of an instance: encoded requests and blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator


def exchange_words(group: GroupCoordinator, parts: Sequence[Sequence[np.ndarray]], device: torch.device) -> np.ndarray:
    """Send int64 words parts[d] to each rank d; returns those of all ranks for this one, in rank order."""
    sent = [np.concatenate([np.empty(0, np.int64), *part]) for part in parts]
    sizes = group.all_gather(torch.tensor([len(part) for part in sent], dtype=torch.int64, device=device)).tolist()
    words = torch.from_numpy(np.concatenate(sent)).to(device)
    received = group.all_to_all(words, [len(part) for part in sent], [row[group.rank_in_group] for row in sizes])
    result: np.ndarray = received.cpu().numpy()
    return result


def exchange_blocks(
    group: GroupCoordinator,
    caches: Sequence[tuple[Tensor, ...]],
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
) -> None:
    """Copy the content of blocks sent[d] to each rank d, and into blocks received[s] what comes from each rank s.

    One tensor of one layer at a time, so that the copies take one such tensor's part of the moved cache.
    """
    sent_sizes, received_sizes = [len(blocks) for blocks in sent], [len(blocks) for blocks in received]
    for pages in (tensor for cache in caches for tensor in cache):
        sources, targets = (
            torch.tensor([block for blocks in lists for block in blocks], dtype=torch.int64, device=pages.device)
            for lists in (sent, received)
        )
        arrived = group.all_to_all(pages.index_select(0, sources), sent_sizes, received_sizes)
        pages.index_copy_(0, targets, arrived)
