"""Assigns KV blocks to the tokens of requests."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request


class KVCacheManager:
    """Gives requests blocks for their tokens and takes them back; knows shared prefixes when prefix caching is on.

    A prompt of P tokens is computed once for all sequences that begin with it: they share its full blocks, and each
    copies the entries of the last, partly filled block up to its token P-1. The last token is computed by each, to
    sample from.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._block_copies: list[tuple[int, int]] = []  # of the step being scheduled
        self._fresh_tails: set[int] = set()  # blocks whose tail this step computes or copies
        self._tail_sources: dict[str, int] = {}  # by request, from take_cached_prefix to allocate_slots

    def take_cached_prefix(self, request: Request) -> bool:
        """Assign to a request the cached blocks of its leading full blocks, and find a block to copy the rest of its
        prompt from. At least one token is left to compute.

        Returns False, and assigns nothing, when the current step computes what it would copy: the next step has it.
        """
        assert not request.block_ids and request.num_computed_tokens == 0, request.request_id
        if not self.enable_prefix_caching or request.needs_prompt_logprobs:
            return True
        blocks: list[int] = []
        usable = (len(request.token_ids) - 1) // self.block_size
        for block_hash in self._hashes(request, usable)[:usable]:
            if (block := self.pool.find(block_hash)) is None:
                break
            blocks.append(block)
        num_computed = len(blocks) * self.block_size
        num_shared = request.num_prompt_tokens - 1
        if num_computed < num_shared < num_computed + self.block_size:
            tails = self.pool.tails(self._tail_hash(request))
            source = next((block for block in tails if block not in self._fresh_tails), None)
            if source is not None:
                self._tail_sources[request.request_id] = source
                num_computed = num_shared
            elif tails:
                return False
        self.pool.share(blocks)
        request.block_ids = blocks
        request.num_registered_blocks = len(blocks)
        request.num_computed_tokens = num_computed
        return True

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Blocks added so that `num_new_tokens` more tokens fit (maybe none, []), or None, and nothing changed, when
        too few are free.
        """
        end = request.num_computed_tokens + num_new_tokens
        missing = self.blocks_missing(request, num_new_tokens)
        if missing > self.pool.num_free_blocks:
            return None
        new_blocks = self.pool.allocate(missing)
        request.block_ids += new_blocks
        if self.enable_prefix_caching:
            self._register(request, min(end, len(request.token_ids)))  # drafts may be wrong
        return new_blocks

    def allocate_decoding(self, requests: Sequence[Request], drafts: dict[str, list[int]]) -> list[list[int]]:
        """`allocate_slots` of one token, and of a request's `drafts`, for the first requests, up to one that brings
        several or gets no block; takes out the drafts for which there is no block.
        """
        size = self.block_size
        added: list[list[int]] = []
        for request in requests:
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed != 1:
                break
            if request.request_id in drafts:
                new_blocks = self.allocate_slots(request, 1 + len(drafts[request.request_id]))
                if new_blocks is not None:
                    added.append(new_blocks)
                    continue
                del drafts[request.request_id]
            # Nearly every time within a block.
            is_within = (computed + 1) % size and computed < len(request.block_ids) * size
            if is_within and computed >= request.num_prompt_tokens:
                added.append([])
                continue
            new_blocks = self.allocate_slots(request, 1)
            if new_blocks is None:
                break
            added.append(new_blocks)
        return added

    def blocks_missing(self, request: Request, num_new_tokens: int) -> int:
        """Blocks that `num_new_tokens` more tokens need."""
        return max(0, -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(request.block_ids))

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks that the scheduled step begins with."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def finish_step(self) -> None:
        """Make what the last step wrote readable for other sequences."""
        self._fresh_tails.clear()

    def free(self, request: Request) -> None:
        """Take back all blocks of a request that finished or is preempted."""
        self._tail_sources.pop(request.request_id, None)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.num_computed_tokens = 0

    def set_apart(self, request: Request) -> None:
        """Let the request keep its blocks while the weights change; its later entries are not shared."""
        request.num_registered_blocks = sys.maxsize

    def reset_prefix_cache(self) -> None:
        """Forget all contents: the weights or the cache have changed."""
        self.pool.forget_contents()
        self._fresh_tails.clear()
        self._block_copies.clear()

    def _register(self, request: Request, end: int) -> None:
        """Make the blocks of the first `end` tokens findable."""
        # The step that computes these tokens writes them to the cache before any sequence of the step attends, so a
        # request admitted later in the same step may already share them. Copies are made before that.
        num_full = end // self.block_size
        if num_full > request.num_registered_blocks:
            hashes = self._hashes(request, num_full)
            for index in range(request.num_registered_blocks, num_full):
                self.pool.register(request.block_ids[index], hashes[index])
            request.num_registered_blocks = num_full
        num_shared = request.num_prompt_tokens - 1
        if request.num_computed_tokens <= num_shared <= end and num_shared % self.block_size:
            block = request.block_ids[num_shared // self.block_size]
            source = self._tail_sources.pop(request.request_id, None)
            if source is not None:
                self._block_copies.append((source, block))
            self.pool.register_tail(block, self._tail_hash(request))
            self._fresh_tails.add(block)

    def _tail_hash(self, request: Request) -> int:
        """Content hash of the prompt but its last token, which ends within a block."""
        num_shared = request.num_prompt_tokens - 1
        start = num_shared // self.block_size * self.block_size
        num_before = start // self.block_size
        before = self._hashes(request, num_before)[num_before - 1] if num_before else 0
        return self._hash(before, request.token_ids[start:num_shared])

    def _hashes(self, request: Request, count: int) -> list[int]:
        """Content hashes of at least the first `count` blocks, each over its tokens and the hash before it.

        The request's own list, which grows.
        """
        hashes = request.block_hashes
        while len(hashes) < count:
            start = len(hashes) * self.block_size
            tokens = request.token_ids[start : start + self.block_size]
            hashes.append(self._hash(hashes[-1] if hashes else 0, tokens))
        return hashes

    @staticmethod
    def _hash(before: int, tokens: list[int]) -> int:
        digest = hashlib.blake2b(before.to_bytes(16, "little"), digest_size=16)
        digest.update(array("q", tokens).tobytes())
        return int.from_bytes(digest.digest(), "little")
