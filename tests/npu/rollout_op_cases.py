"""How each entry of the rollout table is tested: its calls, and the torch_npu ops that a native entry executes.

The entries around the cache and sampling are in test_rollout_layers.py, exchanged_experts in test_expert_exchange.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.npu.op_parity import BF16, FP32, Call, Entry, Maker
from vllm.ops.contract import DecodeMetadata, HeadNorms, KVCache, PrefillMetadata, RolloutOps, RouterSettings
from vllm_ascend.ops.kv_layout import FRACTAL


@dataclass(frozen=True)
class Sizes:
    """What one die sees in a step."""

    query_lens: tuple[int, ...]  # of a prefill; a sequence has seq_lens tokens in the cache, these included
    seq_lens: tuple[int, ...]
    block_size: int
    hidden: int
    latent: int
    heads: int
    nope: int
    rope: int
    value: int
    experts: int
    groups: int
    kept_groups: int
    choices: int
    local_experts: int
    width: int

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def blocks_of_a_sequence(self) -> int:
        return -(-max(self.seq_lens) // self.block_size)


SMALL = Sizes((5, 3, 20), (5, 37, 20), 16, 24, 32, 2, 24, 16, 20, 8, 4, 2, 3, 3, 12)
TINY = {"small heads": SMALL, "deepseek's heads": replace(SMALL, latent=512, rope=64)}
# DeepSeek-V3 on 256 dies: TP 2 and DP 128 for attention, EP 256, pages of 128 tokens, 32 sequences of 4,096 tokens, of
# which a prefill step of up to 8,192 new tokens takes the last chunks.
REAL = Sizes((256,) * 32, (4096,) * 32, 128, 7168, 512, 64, 128, 64, 128, 256, 8, 4, 8, 1, 2048)


def new_kv_cache(new: Maker, size: Sizes) -> Call:
    """All slots, latent then rope channels, whatever the parts are."""

    def run(ops: RolloutOps, like: Tensor) -> Tensor:
        cache = ops.new_kv_cache(7, size.block_size, size.latent, size.rope, like.dtype, like.device, "nd")
        return torch.cat([pages.flatten(0, 1) for pages in cache], -1)

    return Call(run, [torch.empty(0, dtype=new.dtype)])


def linear(new: Maker, size: Sizes) -> Call:
    """A slice of columns, and both memory orders of the weight."""

    def run(ops: RolloutOps, x: Tensor, weight_OI: Tensor, weight_IO: Tensor) -> tuple[Tensor, Tensor]:
        return ops.linear(x[:, : size.hidden], weight_OI), ops.linear(x[:, : size.hidden], weight_IO.t())

    weights = [new.floats(size.width, size.hidden), new.floats(size.hidden, size.width)]
    return Call(run, [new.floats(size.tokens, size.hidden + 3), *weights])


def head_linear(new: Maker, size: Sizes) -> Call:
    """Into the latent space and out of it, as absorbed attention does."""

    def run(ops: RolloutOps, q: Tensor, kv_b: Tensor) -> tuple[Tensor, Tensor]:
        q_latent = ops.head_linear(q[..., : size.nope], kv_b[:, : size.nope])
        return q_latent, ops.head_linear(q_latent, kv_b[:, size.nope :].transpose(1, 2))

    kv_b = new.floats(size.heads, size.nope + size.value, size.latent) / size.latent**0.5
    return Call(run, [new.floats(size.tokens, size.heads, size.nope + size.rope), kv_b])


def rms_norm(new: Maker, size: Sizes) -> Call:
    """A slice of columns."""

    def run(ops: RolloutOps, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x[:, : size.hidden], weight, 1e-6)

    return Call(run, [new.floats(size.tokens, size.hidden + 3), new.floats(size.hidden)])


def silu_and_mul(new: Maker, size: Sizes) -> Call:
    return Call(lambda ops, x: ops.silu_and_mul(x), [new.floats(size.tokens, 2 * size.width)])


def rotary(new: Maker, size: Sizes) -> Call:
    """The position channels of queries, a slice of them."""

    def run(ops: RolloutOps, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ops.rotary_interleaved(q[..., size.nope :], (cos, sin))

    cos, sin = (table.repeat(1, 2) for table in new.angles(size.tokens, size.rope // 2))
    return Call(run, [new.floats(size.tokens, size.heads, size.nope + size.rope), cos, sin])


def prefill(new: Maker, size: Sizes, layout: str = "nd") -> Call:
    """Whole prompts and later chunks, twice: the second layer of a step finds what the first one derived."""
    query_lens, seq_lens = np.array(size.query_lens), np.array(size.seq_lens)

    def run(ops: RolloutOps, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope, tables, lens, ends = rest
        cache = as_cache(ops, latent, rope, layout)
        meta = PrefillMetadata(query_lens, seq_lens, ends, lens, tables, size.block_size)
        first = ops.mla_prefill((q_nope, q_rope), kv_b, cache, meta, 0.15)
        return first, ops.mla_prefill((q_nope, q_rope), kv_b, cache, meta, 0.15)

    queries = [new.floats(size.tokens, size.heads, channels) for channels in (size.nope, size.rope)]
    kv_b = new.floats(size.heads, size.nope + size.value, size.latent) / size.latent**0.5
    ends = torch.tensor([0, *size.query_lens]).cumsum(0).int()
    return Call(run, [*queries, kv_b, *_pages(new, size), ends])


def prefill_from_fractals(new: Maker, size: Sizes) -> Call:
    return prefill(new, size, "nz")


def decode(new: Maker, size: Sizes, layout: str = "nd") -> Call:
    seq_lens = np.array(size.seq_lens)

    def run(ops: RolloutOps, q_latent: Tensor, q_rope: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope, tables, lens = rest
        cache = as_cache(ops, latent, rope, layout)
        meta = DecodeMetadata(seq_lens, lens, tables, size.block_size)
        first = ops.mla_decode((q_latent, q_rope), cache, meta, 0.05)
        return first, ops.mla_decode((q_latent, q_rope), cache, meta, 0.05)

    queries = [new.floats(len(seq_lens), size.heads, channels) for channels in (size.latent, size.rope)]
    return Call(run, [*queries, *_pages(new, size)])


def decode_from_fractals(new: Maker, size: Sizes) -> Call:
    return decode(new, size, "nz")


def router(new: Maker, size: Sizes, normalize: bool = True, scoring: str = "sigmoid") -> Call:
    """Compares the weights by expert: the order of the choices is free."""

    def run(ops: RolloutOps, logits: Tensor, bias: Tensor) -> Tensor:
        settings = RouterSettings(size.choices, size.groups, size.kept_groups, normalize, 2.5, scoring)
        weights, ids = ops.topk_router(logits, bias if scoring == "sigmoid" else None, settings)
        assert weights.dtype == FP32 and ids.dtype == torch.int64
        return torch.zeros_like(logits).scatter(1, ids, weights)

    return Call(run, [new.floats(size.tokens, size.experts), new.floats(size.experts)])


def router_without_division(new: Maker, size: Sizes) -> Call:
    return router(new, size, normalize=False)


def router_of_softmax_scores(new: Maker, size: Sizes) -> Call:
    return router(new, size, normalize=False, scoring="softmax")


def gqa_write(new: Maker, size: Sizes) -> Call:
    """The queries, and all slots of the cache, keys before values, after a write to scattered ones: with norms, with
    biases, and with biases and half of the channels turned.
    """
    kv_heads, channels = 2, size.rope

    def run(ops: RolloutOps, qkv: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        q_weight, k_weight, bias_MD, cos, sin, half_cos, half_sin, slots = rest
        found: list[Tensor] = []
        for bias, norms, angles in (
            (None, HeadNorms(q_weight, k_weight, 1e-6), (cos, sin)),
            (bias_MD, None, (cos, sin)),
            (bias_MD, HeadNorms(q_weight, k_weight, 1e-6), (half_cos, half_sin)),
        ):
            blocks = -(-2 * size.tokens // size.block_size)
            cache = ops.new_gqa_cache(blocks, size.block_size, kv_heads, channels, qkv.dtype, qkv.device)
            qkv_TMD = qkv[:, 3:].unflatten(1, (-1, channels))
            found.append(ops.rope_write_gqa(cache, qkv_TMD, bias, norms, angles, slots))
            found.append(torch.cat([pages.flatten(0, 1).flatten(1) for pages in cache], -1))
        return tuple(found)

    with new.mode:
        slots = torch.arange(size.tokens).flip(0) * 2
    angles = [table.repeat(1, 2) for table in new.angles(size.tokens, channels // 2)]
    half_angles = [table.repeat(1, 2) for table in new.angles(size.tokens, channels // 4)]
    heads = size.heads * 2 + 2 * kv_heads
    qkv = new.floats(size.tokens, 3 + heads * channels)
    weights = [new.floats(channels), new.floats(channels), new.floats(heads, channels)]
    return Call(run, [qkv, *weights, *angles, *half_angles, slots])


def new_gqa_cache(new: Maker, size: Sizes) -> Call:
    def run(ops: RolloutOps, like: Tensor) -> Tensor:
        cache = ops.new_gqa_cache(7, size.block_size, 2, size.rope, like.dtype, like.device)
        return torch.cat([pages.flatten(0, 1).flatten(1) for pages in cache], -1)

    return Call(run, [torch.empty(0, dtype=new.dtype)])


def gqa_prefill(new: Maker, size: Sizes) -> Call:
    query_lens, seq_lens = np.array(size.query_lens), np.array(size.seq_lens)

    def run(ops: RolloutOps, q: Tensor, keys: Tensor, values: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        tables, lens, ends = rest
        meta = PrefillMetadata(query_lens, seq_lens, ends, lens, tables, size.block_size)
        cache = as_gqa_cache(ops, keys, values)
        return ops.gqa_prefill(q, cache, meta, 0.15), ops.gqa_prefill(q, cache, meta, 0.15)

    ends = torch.tensor([0, *size.query_lens]).cumsum(0).int()
    return Call(run, [new.floats(size.tokens, 2 * size.heads, size.rope), *_gqa_pages(new, size), ends])


def gqa_decode(new: Maker, size: Sizes) -> Call:
    seq_lens = np.array(size.seq_lens)

    def run(ops: RolloutOps, q: Tensor, keys: Tensor, values: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        tables, lens = rest
        meta = DecodeMetadata(seq_lens, lens, tables, size.block_size)
        cache = as_gqa_cache(ops, keys, values)
        return ops.gqa_decode(q, cache, meta, 0.05), ops.gqa_decode(q, cache, meta, 0.05)

    return Call(run, [new.floats(len(seq_lens), 2 * size.heads, size.rope), *_gqa_pages(new, size)])


def experts(new: Maker, size: Sizes, tokens: int | None = None, first: int = 2, choices_of: int | None = None) -> Call:
    """The weights in the memory order that the contract says."""

    def run(ops: RolloutOps, x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return ops.fused_experts(x, (w13.transpose(1, 2), w2.transpose(1, 2)), (weights, ids), first)

    tokens = size.tokens if tokens is None else tokens
    w13 = new.floats(size.local_experts, size.hidden, 2 * size.width) / 4
    w2 = new.floats(size.local_experts, size.width, size.hidden) / 4
    weights = new.floats(tokens, size.choices, dtype=FP32).abs()
    ids = new.choices(tokens, size.choices, choices_of or size.experts)
    return Call(run, [new.floats(tokens, size.hidden), w13, w2, weights, ids])


def experts_of_all_tokens(new: Maker, size: Sizes) -> Call:
    """Every choice is one of this rank's experts."""
    return experts(new, replace(size, local_experts=max(size.choices, size.local_experts)), first=0, choices_of=3)


def experts_that_nobody_chose(new: Maker, size: Sizes) -> Call:
    return experts(new, size, first=size.experts)


def experts_without_tokens(new: Maker, size: Sizes) -> Call:
    return experts(new, size, tokens=0)


def as_cache(ops: RolloutOps, latent: Tensor, rope: Tensor, layout: str) -> KVCache:
    """Pages as the table keeps them: together (reference) or apart, in the layout asked for (Ascend)."""
    if ops.implementations["new_kv_cache"] == "reference":
        return (torch.cat((latent, rope), -1),)
    return (_nz(latent), _nz(rope)) if layout == "nz" else (latent, rope)


def as_gqa_cache(ops: RolloutOps, keys: Tensor, values: Tensor) -> KVCache:
    """Pages [num_blocks, block_size, 2, D] as the table keeps them: in one (reference) or two (Ascend) tensors."""
    if ops.implementations["new_gqa_cache"] == "reference":
        return (torch.stack((keys, values), dim=2),)
    return keys.flatten(2), values.flatten(2)


def _gqa_pages(new: Maker, size: Sizes) -> list[Tensor]:
    _, _, tables, lens = _pages(new, size)
    pages = [new.floats(tables.numel(), size.block_size, 2, size.rope) for _ in range(2)]
    return [*pages, tables, lens]


def _pages(new: Maker, size: Sizes) -> list[Tensor]:
    """Latent and rope pages, block tables in scattered order, lengths; tables and lengths always hold values."""
    count = size.blocks_of_a_sequence
    tables = torch.arange(len(size.seq_lens) * count).flip(0).int().view(-1, count)
    pages = [new.floats(tables.numel(), size.block_size, channels) for channels in (size.latent, size.rope)]
    return [*pages, tables, torch.tensor(size.seq_lens).int()]


def _entry(*cases: Any, npu_ops: tuple[str, ...] = (), **options: Any) -> Entry:
    return Entry({case.__name__: case for case in cases}, frozenset(npu_ops), **options)


CASES: dict[str, Entry] = {
    "new_kv_cache": _entry(new_kv_cache),
    "linear": _entry(linear, tolerance={FP32: 1e-5, BF16: 1e-2}),
    "head_linear": _entry(head_linear, tolerance={FP32: 1e-5, BF16: 1e-2}),
    "rms_norm": _entry(rms_norm, npu_ops=("npu_rms_norm",)),
    "rotary_interleaved": _entry(rotary, npu_ops=("npu_interleave_rope", "npu_rotary_mul")),
    "mla_prefill": _entry(
        prefill, prefill_from_fractals, npu_ops=("npu_fusion_attention",), tolerance={FP32: 1e-5, BF16: 1e-2}
    ),
    "mla_decode": _entry(
        decode,
        decode_from_fractals,
        npu_ops=("npu_fused_infer_attention_score", "npu_fusion_attention"),
        tolerance={FP32: 1e-5, BF16: 1e-2},
    ),
    "new_gqa_cache": _entry(new_gqa_cache),
    "rope_write_gqa": _entry(gqa_write, npu_ops=("npu_rms_norm", "npu_rotary_mul"), tolerance={FP32: 1e-5, BF16: 2e-2}),
    "gqa_prefill": _entry(gqa_prefill, npu_ops=("npu_fusion_attention",), tolerance={FP32: 1e-5, BF16: 1e-2}),
    "gqa_decode": _entry(gqa_decode, npu_ops=("npu_fused_infer_attention_score",), tolerance={FP32: 1e-5, BF16: 1e-2}),
    "topk_router": _entry(
        router, router_without_division, router_of_softmax_scores, npu_ops=("npu_moe_gating_top_k",), dtypes=(FP32,)
    ),
    "fused_experts": _entry(
        experts,
        experts_of_all_tokens,
        experts_that_nobody_chose,
        experts_without_tokens,
        npu_ops=("npu_moe_token_permute", "npu_grouped_matmul", "npu_swiglu", "_npu_moe_token_unpermute"),
        tolerance={FP32: 1e-5, BF16: 1e-2},
        output_like=0,
    ),
    "silu_and_mul": _entry(silu_and_mul, npu_ops=("npu_swiglu",)),
}


def _nz(blocks_BSC: Tensor) -> Tensor:
    """nd -> nz."""
    return blocks_BSC.unflatten(-1, (-1, FRACTAL)).transpose(1, 2).contiguous()
