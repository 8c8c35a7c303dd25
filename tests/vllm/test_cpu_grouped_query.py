"""Grouped-query attention of the CPU table against the reference, and what a token's result must not depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vllm.test_cpu_ops import REFERENCE, TABLES, TOLERANCE, gap
from vllm.ops.contract import DecodeMetadata, HeadNorms, KVCache, PrefillMetadata, RolloutOps

BUILDS_KERNELS = True  # when it is imported (tests/compiler.py)
CPU = torch.device("cpu")
# Query heads, heads of keys and values, channels: of published models, and of none.
SHAPES = [(16, 8, 128), (4, 4, 64), (12, 2, 80), (16, 1, 256), (30, 2, 24), (3, 1, 7)]


class Context:
    """Sequences of random queries, keys and values, whose blocks lie scattered in the cache of a table."""

    def __init__(
        self, seq_lens: list[int], shape: tuple[int, int, int], dtype: torch.dtype, block_size: int = 16
    ) -> None:
        heads, kv_heads, channels = shape
        generator = torch.Generator().manual_seed(0)
        self.shape, self.block_size, self.seq_lens = shape, block_size, np.array(seq_lens)
        blocks = -(-max(seq_lens) // block_size)
        self.tables = torch.randperm(len(seq_lens) * blocks, generator=generator).int().view(len(seq_lens), blocks)
        total = sum(seq_lens)
        self.qkv = torch.randn(total, heads + 2 * kv_heads, channels, generator=generator).to(dtype)
        self.starts = np.cumsum(self.seq_lens) - self.seq_lens
        rows = np.repeat(np.arange(len(seq_lens)), seq_lens)
        offsets = torch.from_numpy(np.arange(total) - self.starts[rows])
        blocks_T = self.tables[torch.from_numpy(rows), offsets // block_size].long()
        self.slots = blocks_T * block_size + offsets % block_size

    def cache(self, ops: RolloutOps) -> tuple[KVCache, Tensor]:
        """The cache with all tokens, and the queries; positions turn nothing."""
        _, kv_heads, channels = self.shape
        cache = ops.new_gqa_cache(self.tables.numel(), self.block_size, kv_heads, channels, self.qkv.dtype, CPU)
        angles = torch.ones(len(self.qkv), 2), torch.zeros(len(self.qkv), 2)
        return cache, ops.rope_write_gqa(cache, self.qkv, None, None, angles, self.slots)

    def tokens(self, spans: list[tuple[int, int]]) -> Tensor:
        """Indices of the tokens [first, last) of each sequence."""
        pairs = zip(self.starts, spans, strict=True)
        return torch.cat([torch.arange(start + first, start + last) for start, (first, last) in pairs])

    def prefill(self, ops: RolloutOps, cache: KVCache, q: Tensor, spans: list[tuple[int, int]]) -> Tensor:
        """Attention of the tokens [first, last) of each sequence, after those before them."""
        new, total = np.array([last - first for first, last in spans]), np.array([last for _, last in spans])
        ends = torch.from_numpy(np.cumsum([0, *new])).int()
        meta = PrefillMetadata(new, total, ends, torch.from_numpy(total).int(), self.tables, self.block_size)
        return ops.gqa_prefill(q[self.tokens(spans)], cache, meta, 0.15)

    def decode(self, ops: RolloutOps, cache: KVCache, q: Tensor, rows: slice = slice(None)) -> Tensor:
        """Attention of the last token of each sequence."""
        lens, last = self.seq_lens[rows], torch.from_numpy(self.starts + self.seq_lens - 1)[rows]
        tables = self.tables[rows].contiguous()
        meta = DecodeMetadata(lens, torch.from_numpy(lens).int(), tables, self.block_size)
        return ops.gqa_decode(q[last], cache, meta, 0.15)


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [16, 5, 48])
def test_attention_equals_the_reference(how: str, shape: tuple[int, int, int], block_size: int) -> None:
    """Contexts of one token, at a span's border and over several; prompts from their start and later chunks."""
    table, dtype = TABLES[how]
    context = Context([1, 127, 128, 129, 300, 17], shape, dtype, block_size)
    spans = [(0, 1), (0, 127), (100, 128), (128, 129), (0, 300), (3, 17)]
    found, wanted = (
        [context.decode(ops, *context.cache(ops)), context.prefill(ops, *context.cache(ops), spans)]
        for ops in (table, REFERENCE)
    )
    assert max(gap(*pair) for pair in zip(found, wanted, strict=True)) < TOLERANCE[dtype]


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize("shape", [(16, 8, 128), (24, 2, 80), (4, 4, 24)])
def test_prefill_in_any_chunks_equals_decode_bit_by_bit(how: str, shape: tuple[int, int, int]) -> None:
    table, dtype = TABLES[how]
    lens = [1, 40, 150, 290]
    context = Context(lens, shape, dtype)
    cache, q = context.cache(table)
    whole = context.prefill(table, cache, q, [(0, length) for length in lens])
    first, second = ([(0, -(-n // 3)) for n in lens], [(-(-n // 3), n) for n in lens])
    cut = torch.empty_like(whole)
    cut[context.tokens(first)] = context.prefill(table, cache, q, first)
    cut[context.tokens(second)] = context.prefill(table, cache, q, second)
    assert torch.equal(cut, whole)
    last = torch.from_numpy(context.starts + context.seq_lens - 1)
    assert torch.equal(context.decode(table, cache, q), whole[last])
    for b in range(len(lens)):
        assert torch.equal(context.decode(table, cache, q, slice(b, b + 1))[0], whole[last[b]])


@pytest.mark.parametrize("how", list(TABLES))
def test_attention_does_not_depend_on_the_number_of_threads(how: str) -> None:
    table, dtype = TABLES[how]
    context, before, found = Context([200, 3, 90], (8, 2, 64), dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            cache, q = context.cache(table)
            spans = [(0, n) for n in context.seq_lens]
            found.append([q, *cache, context.decode(table, cache, q), context.prefill(table, cache, q, spans)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize(("channels", "turned"), [(128, 128), (64, 32), (24, 12), (80, 80)])
@pytest.mark.parametrize("has", ["norms", "bias", "both", "neither"])
def test_queries_and_writes_equal_the_reference(how: str, channels: int, turned: int, has: str) -> None:
    """Scattered slots; what was written is compared through attention to it."""
    table, dtype = TABLES[how]
    heads, kv_heads, tokens = 6, 2, 37
    generator = torch.Generator().manual_seed(1)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    qkv = new(tokens, (heads + 2 * kv_heads) * channels + 3)[:, 3:].unflatten(1, (-1, channels))
    bias = new(heads + 2 * kv_heads, channels) if has in ("bias", "both") else None
    norms = HeadNorms(new(channels), new(channels), 1e-5) if has in ("norms", "both") else None
    angles = torch.randn(tokens, turned // 2, generator=generator).repeat(1, 2)
    tables = torch.tensor([[3, 0, 1, 2]]).int()
    slots = (tables[0].long()[:, None] * 16 + torch.arange(16)).flatten()[:tokens]
    lens = np.array([tokens])
    meta = PrefillMetadata(lens, lens, torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), tables, 16)

    def outcome(ops: RolloutOps) -> list[Tensor]:
        cache = ops.new_gqa_cache(4, 16, kv_heads, channels, dtype, CPU)
        order = torch.arange(tokens - 1, -1, -1)
        how: list[Any] = [bias, norms, (angles.cos()[order], angles.sin()[order]), slots[order]]
        q = ops.rope_write_gqa(cache, qkv[order], *how).index_select(0, order)
        return [q, ops.gqa_prefill(q, cache, meta, channels**-0.5)]

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for found, wanted in zip(outcome(table), outcome(REFERENCE), strict=True):
        assert found.dtype is dtype and gap(found, wanted) < tolerance


def test_heads_that_the_kernels_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=320.*up to 256"):
        TABLES["fp32"][0].new_gqa_cache(1, 16, 1, 320, torch.float32, CPU)
