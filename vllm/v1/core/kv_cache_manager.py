"""Which blocks hold which tokens of which request."""

from __future__ import annotations

import hashlib
from array import array

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request


class KVCacheManager:
    """Gives requests blocks for their tokens and takes them back; knows shared prefixes when prefix caching is on."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    def take_cached_prefix(self, request: Request) -> None:
        """Give a request without blocks those that already hold its leading full blocks.

        At least one token stays to be computed.
        """
        assert not request.block_ids and request.num_computed_tokens == 0, request.request_id
        if not self.enable_prefix_caching:
            return
        blocks: list[int] = []
        usable = (len(request.token_ids) - 1) // self.block_size
        for block_hash in self._hashes(request, usable):
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        self.pool.share(blocks)
        request.block_ids = blocks
        request.num_registered_blocks = len(blocks)
        request.num_computed_tokens = len(blocks) * self.block_size

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks added so that `num_new_tokens` more tokens fit (maybe none, []), or None, and nothing changed, when
        too few are free.
        """
        end = request.num_computed_tokens + num_new_tokens
        missing = -(-end // self.block_size) - len(request.block_ids)
        if missing <= 0:
            new_blocks: list[int] = []
        elif missing > self.pool.num_free_blocks:
            return None
        else:
            new_blocks = self.pool.allocate(missing)
            request.block_ids += new_blocks
        if self.enable_prefix_caching:
            self._register_full_blocks(request, end // self.block_size)
        return new_blocks

    def free(self, request: Request) -> None:
        """Take back all blocks of a request that finished or is preempted."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def reset_prefix_cache(self) -> None:
        """Forget all contents: the weights or the cache have changed."""
        self.pool.forget_contents()

    def _register_full_blocks(self, request: Request, num_full: int) -> None:
        # The step that computes these tokens writes them to the cache before any sequence of the step attends, so a
        # request admitted later in the same step may already share them.
        if num_full > request.num_registered_blocks:
            hashes = self._hashes(request, num_full)
            for index in range(request.num_registered_blocks, num_full):
                self.pool.register(request.block_ids[index], hashes[index])
            request.num_registered_blocks = num_full

    def _hashes(self, request: Request, count: int) -> list[int]:
        """Content hashes of the first `count` blocks, each over its tokens and the hash before it.

        Kept on the request.
        """
        hashes = request.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            digest = hashlib.blake2b((hashes[-1] if hashes else 0).to_bytes(16, "little"), digest_size=16)
            digest.update(array("q", request.token_ids[start : start + self.block_size]).tobytes())
            hashes.append(int.from_bytes(digest.digest(), "little"))
        return hashes[:count]
