"""The reference ops against the formulas of the contract, written plainly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm.ops.contract import DecodeMetadata, HeadNorms, PrefillMetadata, RouterSettings, resolve
from vllm.ops.reference import rollout_ops, write_kv

N, P, R, L, V, BLOCK = 3, 10, 6, 12, 8, 4
OPS = rollout_ops()


def make_cache(seq_lens: list[int], seed: int = 0) -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]:
    """(cache, block tables, each sequence's [len, L + R] latents), blocks scattered."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // BLOCK) for n in seq_lens]
    ids = torch.randperm(sum(counts) + 3, generator=generator)
    cache = OPS.new_kv_cache(len(ids), BLOCK, L, R, torch.float32, torch.device("cpu"), "nd")
    tables = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32)
    latents, used = [], 0
    for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        tables[i, :count] = ids[used : used + count]
        used += count
        latent = torch.randn(length, L + R, generator=generator)
        positions = torch.arange(length)
        slots = tables[i].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        write_kv(cache, latent[:, :L], latent[:, L:], slots)
        latents.append(latent)
    return cache, tables, latents


@pytest.mark.parametrize("seq_lens", [[1, 5, 8, 3], [2, 90, 7, 33, 1, 88]])
def test_decode_attends_to_each_sequence_alone(seq_lens: list[int]) -> None:
    cache, tables, latents = make_cache(seq_lens)
    q = torch.randn(len(seq_lens), N, L + R)
    lens = np.array(seq_lens)
    meta = DecodeMetadata(lens, torch.tensor(seq_lens, dtype=torch.int32), tables, BLOCK)
    for _ in range(2):  # the second layer of a step reuses the plan
        out = OPS.mla_decode((q[..., :L], q[..., L:]), cache, meta, 0.3)
        for i, latent in enumerate(latents):
            expected = (q[i] @ latent.T * 0.3).softmax(-1) @ latent[:, :L]
            torch.testing.assert_close(out[i], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lens", [[(4, 4), (3, 9), (2, 2)], [(2, 70), (60, 60), (2, 3), (30, 95)]])
def test_prefill_is_causal_over_context_and_new_tokens(lens: list[tuple[int, int]]) -> None:
    """(new, total) lengths; long chunks go through expanded keys and values, short ones stay in latent space."""
    query_lens, seq_lens = np.array(lens).T
    cache, tables, latents = make_cache(seq_lens.tolist())
    cu_query_lens = np.concatenate(([0], query_lens.cumsum()))
    cu, totals = torch.from_numpy(cu_query_lens).int(), torch.from_numpy(seq_lens).int()
    meta = PrefillMetadata(query_lens, seq_lens, cu, totals, tables, BLOCK)
    q, kv_b = torch.randn(int(query_lens.sum()), N, P + R), torch.randn(N, P + V, L)
    out = OPS.mla_prefill((q[..., :P], q[..., P:]), kv_b, cache, meta, 0.2)
    for i, latent in enumerate(latents):
        expanded = torch.einsum("sl,ncl->snc", latent[:, :L], kv_b)
        keys = torch.cat((expanded[..., :P], latent[:, None, L:].expand(-1, N, -1)), -1)
        rows = slice(int(cu_query_lens[i]), int(cu_query_lens[i + 1]))
        scores = torch.einsum("qnd,snd->nqs", q[rows], keys) * 0.2
        position = torch.arange(seq_lens[i] - query_lens[i], seq_lens[i])[:, None]
        scores.masked_fill_(torch.arange(seq_lens[i]) > position, float("-inf"))
        expected = torch.einsum("nqs,snv->qnv", scores.softmax(-1), expanded[..., P:])
        torch.testing.assert_close(out[rows], expected, atol=1e-4, rtol=1e-4)


def test_rotary_turns_pairs_and_sorts_them() -> None:
    angles = torch.rand(5, R // 2)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    wide = torch.randn(5, N, R + 3)
    for x in (wide[..., 3:], wide[..., :R].contiguous()):  # an odd offset, too
        out = OPS.rotary_interleaved(x, (cos, sin))
        for i in range(R // 2):
            c, s = angles[:, None, i].cos(), angles[:, None, i].sin()
            torch.testing.assert_close(out[..., i], x[..., 2 * i] * c - x[..., 2 * i + 1] * s)
            torch.testing.assert_close(out[..., R // 2 + i], x[..., 2 * i + 1] * c + x[..., 2 * i] * s)


def test_cache_holds_normed_latents_and_turned_keys() -> None:
    angles = torch.rand(5, R // 2) * 6
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    kv, weight = torch.randn(5, 3 + L + R)[:, 3:], torch.rand(L)
    (pages,) = cache = OPS.new_kv_cache(3, BLOCK, L, R, torch.float32, torch.device("cpu"), "nd")
    slots = torch.tensor([7, 0, 11, 2, 5])
    OPS.norm_rope_write_kv(cache, kv, weight, 1e-3, (cos, sin), slots)
    latent = kv[:, :L] / (kv[:, :L].square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    even, odd = kv[:, L::2], kv[:, L + 1 :: 2]
    rope = torch.cat((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), dim=-1)
    expected = torch.zeros(3 * BLOCK, L + R).index_copy_(0, slots, torch.cat((latent, rope), dim=-1))
    torch.testing.assert_close(pages.flatten(0, 1), expected)


def test_norm_of_a_sum() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    total = x + residual
    normed, summed = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, total)
    torch.testing.assert_close(normed, OPS.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("first", [0, 2, 4])
def test_experts_add_only_what_this_rank_holds(first: int) -> None:
    hidden, width, local = 7, 5, 3
    x, weights, ids = torch.randn(9, hidden), torch.rand(9, 2), torch.stack([torch.randperm(7)[:2] for _ in range(9)])
    w13, w2 = torch.randn(local, 2 * width, hidden), torch.randn(local, hidden, width)
    expected = torch.zeros_like(x)
    for t in range(9):
        for k in range(2):
            e = int(ids[t, k]) - first
            if 0 <= e < local:
                gate, up = (w13[e] @ x[t]).chunk(2)
                expected[t] += weights[t, k] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(OPS.fused_experts(x, (w13, w2), (weights, ids), first), expected, atol=1e-4, rtol=1e-4)
    assert OPS.fused_experts(x[:0], (w13, w2), (weights[:0], ids[:0]), first).shape == (0, hidden)


def test_router_bias_selects_but_does_not_weigh() -> None:
    logits = torch.zeros(1, 8)
    bias = torch.tensor([0.0, 0.0, 5.0, 4.0, 9.0, -9.0, 0.0, 0.0])
    weights, ids = OPS.topk_router(logits, bias, RouterSettings(2, 4, 1, True, 2.5, "sigmoid"))
    assert sorted(ids[0].tolist()) == [2, 3]  # the group's two best sum to 9 + 1, group 2's to 0 + 1
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))


def test_softmax_router_ranks_groups_by_their_best_expert() -> None:
    logits = torch.tensor([[2.0, -9.0, 1.8, 1.7, -9.0, -9.0]])
    weights, ids = OPS.topk_router(logits, None, RouterSettings(2, 3, 1, False, 4.0, "softmax"))
    assert sorted(ids[0].tolist()) == [0, 1]  # group 1 has the larger sum, group 0 the best expert
    torch.testing.assert_close(weights, 4.0 * logits.softmax(-1).gather(1, ids))
    normalized, ids = OPS.topk_router(logits, None, RouterSettings(2, 1, 1, True, 4.0, "softmax"))
    assert sorted(ids[0].tolist()) == [0, 2]
    torch.testing.assert_close(normalized.sum(), torch.tensor(4.0))


def make_gqa_cache(seq_lens: list[int]) -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]:
    """(cache, block tables, each sequence's [len, 2, G, D] keys and values), blocks scattered."""
    counts = [-(-n // BLOCK) for n in seq_lens]
    ids = torch.randperm(sum(counts) + 3)
    (pages,) = cache = OPS.new_gqa_cache(len(ids), BLOCK, 2, R, torch.float32, torch.device("cpu"))
    tables, used, contexts = torch.zeros(len(seq_lens), max(counts), dtype=torch.int32), 0, []
    for i, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        tables[i, :count] = ids[used : used + count]
        used += count
        contexts.append(torch.randn(length, 2, 2, R))
        positions = torch.arange(length)
        slots = tables[i].long()[positions // BLOCK] * BLOCK + positions % BLOCK
        pages.view(-1, 2, 2, R)[slots] = contexts[-1]
    return cache, tables, contexts


@pytest.mark.parametrize("lens", [[(1, 1), (1, 5), (1, 8)], [(1, 2), (1, 90), (1, 7)], [(4, 4), (3, 9), (2, 70)]])
def test_grouped_query_attention(lens: list[tuple[int, int]]) -> None:
    """(new, total) lengths; head n of 4 reads head n // 2 of keys and values."""
    query_lens, seq_lens = np.array(lens).T
    cache, tables, contexts = make_gqa_cache(seq_lens.tolist())
    q, totals = torch.randn(int(query_lens.sum()), 4, R), torch.from_numpy(seq_lens).int()
    starts = np.concatenate(([0], query_lens.cumsum()))
    prefill = PrefillMetadata(query_lens, seq_lens, torch.from_numpy(starts).int(), totals, tables, BLOCK)
    found = [OPS.gqa_prefill(q, cache, prefill, 0.3) for _ in range(2)]  # the second layer reuses the plan
    if query_lens.max() == 1:
        decode = DecodeMetadata(seq_lens, totals, tables, BLOCK)
        found += [OPS.gqa_decode(q, cache, decode, 0.3) for _ in range(2)]
    for i, context in enumerate(contexts):
        keys, values = (context[:, part].repeat_interleave(2, dim=1) for part in (0, 1))
        rows = slice(int(starts[i]), int(starts[i + 1]))
        scores = torch.einsum("qnd,snd->nqs", q[rows], keys) * 0.3
        position = torch.arange(int(seq_lens[i] - query_lens[i]), int(seq_lens[i]))[:, None]
        scores.masked_fill_(torch.arange(int(seq_lens[i])) > position, float("-inf"))
        expected = torch.einsum("nqs,snd->qnd", scores.softmax(-1), values)
        for out in found:
            torch.testing.assert_close(out[rows], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "is_biased", "is_normed"), [(R, False, True), (R, True, False), (R - 2, True, True)])
def test_cache_holds_turned_keys_beside_values(width: int, is_biased: bool, is_normed: bool) -> None:
    """``width`` of a head's R channels are turned."""
    heads, kv_heads, half = 4, 2, width // 2
    angles = torch.rand(5, half) * 6
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    qkv = torch.randn(5, 3 + (heads + 2 * kv_heads) * R)[:, 3:].unflatten(1, (-1, R))
    norms = HeadNorms(*torch.rand(2, R), 1e-3) if is_normed else None
    bias = torch.randn(qkv.shape[1:]) if is_biased else None
    (pages,) = cache = OPS.new_gqa_cache(3, BLOCK, kv_heads, R, torch.float32, torch.device("cpu"))
    slots = torch.tensor([7, 0, 11, 2, 5])
    q = OPS.rope_write_gqa(cache, qkv, bias, norms, (cos, sin), slots)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
        first, second, c, s = x[..., :half], x[..., half:width], angles[:, None].cos(), angles[:, None].sin()
        return torch.cat((first * c - second * s, second * c + first * s, x[..., width:]), dim=-1)

    biased = qkv if bias is None else qkv + bias
    q_in, k_in, v_in = biased.split((heads, kv_heads, kv_heads), dim=1)
    torch.testing.assert_close(q, turned(q_in, norms and norms.q_weight_D))
    expected = torch.zeros(3 * BLOCK, 2, kv_heads, R)
    expected[slots] = torch.stack((turned(k_in, norms and norms.k_weight_D), v_in), dim=1)
    torch.testing.assert_close(pages.flatten(0, 1), expected)


def test_a_table_must_name_its_entries() -> None:
    with pytest.raises(ValueError, match="implementations of an op table"):
        replace(OPS, implementations={"rms_norm": "native"})
    with pytest.raises(ValueError, match="module:function"):
        resolve("vllm.ops.reference")
