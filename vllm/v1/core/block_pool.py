"""The KV blocks of one rank: reference counts, the free list, and full blocks known by their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

BlockHash = int


class BlockPool:
    """Blocks 0..num_blocks-1. A block is free when no sequence holds it; a free block keeps its content until it is
    reused.

    Free blocks are handed out least recently freed first. A full block can be registered under the hash of its tokens
    and of all tokens before it; `find` then gives it to a sequence with the same prefix. A block that begins with the
    last tokens of a prompt, too few for a full block, can be registered for these tokens as a tail: another sequence
    may copy them.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: the KV cache needs at least one block")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._tail_of: list[BlockHash | None] = [None] * num_blocks
        self._blocks_of_tail: dict[BlockHash, dict[int, None]] = {}  # the first registered first

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content; the caller has checked that so many are free."""
        assert count <= len(self._free), (count, len(self._free))
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each block; free ones leave the free list."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a holder of each block. A sequence's last blocks are reused first: prefixes live longest."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, block
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with this content, if one is left."""
        return self._block_of.get(block_hash)

    def register(self, block: int, block_hash: BlockHash) -> None:
        """Make `block`, full, findable by content; the first block of a content stays the known one."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def tails(self, tail_hash: BlockHash) -> Collection[int]:
        """Blocks that begin with this content."""
        return self._blocks_of_tail.get(tail_hash, ())

    def register_tail(self, block: int, tail_hash: BlockHash) -> None:
        """Make `block` findable by the tokens that it begins with."""
        if self._tail_of[block] is None:
            self._tail_of[block] = tail_hash
            self._blocks_of_tail.setdefault(tail_hash, {})[block] = None

    def forget_contents(self) -> None:
        """Unregister all contents: weights or cache have changed."""
        self._block_of.clear()
        self._blocks_of_tail.clear()
        self._tail_of = [None] * self.num_blocks
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
        tail_hash = self._tail_of[block]
        if tail_hash is not None:
            del self._blocks_of_tail[tail_hash][block]
            if not self._blocks_of_tail[tail_hash]:
                del self._blocks_of_tail[tail_hash]
            self._tail_of[block] = None
