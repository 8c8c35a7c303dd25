"""Each Ascend rollout op equals its reference on the stand-in for torch_npu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.npu.ops_under_test import torch_npu_stand_in
from vllm.ops import reference
from vllm.ops.contract import DecodeMetadata, PrefillMetadata, resolve
from vllm.platforms import resolve_platform
from vllm_ascend.ops import kv_cache, rollout_ops

__all__ = ["torch_npu_stand_in"]
pytestmark = pytest.mark.usefixtures("torch_npu_stand_in")

NATIVE, REFERENCE = rollout_ops(), reference.rollout_ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16]
LATENT, ROPE, NOPE, VALUE, HEADS, BLOCK = 32, 16, 24, 20, 2, 16


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= TOLERANCE[theirs.dtype] * theirs.abs().max().clamp_min(1e-3)


def test_the_table_is_complete_and_found_by_its_provider() -> None:
    assert resolve("vllm_ascend.ops:rollout_ops").names["sample"].endswith("reference draw")


def test_the_platform_is_found() -> None:
    platform = resolve_platform("npu")
    assert (platform.name, platform.dist_backend, platform.rollout_ops) == (
        "npu",
        "hccl",
        "vllm_ascend.ops:rollout_ops",
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_slice_of_columns(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48, dtype=dtype)[:, :32], torch.randn(32, dtype=dtype)
    assert_close(NATIVE.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64, dtype=dtype)
    assert_close(NATIVE.silu_and_mul(x), REFERENCE.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 64])
def test_rotary_order_of_channels(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    angles = (torch.rand(5, size // 2) * 6).repeat(1, 2)
    x = torch.randn(5, 3, size, dtype=dtype)
    assert_close(*(ops.rotary_interleaved(x, angles.cos(), angles.sin()) for ops in (NATIVE, REFERENCE)))


def filled_caches(dtype: torch.dtype, num_tokens: int) -> list[Any]:
    """The same tokens written to both tables' caches, in scattered slots."""
    latent, rope = torch.randn(num_tokens, LATENT, dtype=dtype), torch.randn(num_tokens, ROPE, dtype=dtype)
    slots = torch.arange(num_tokens).flip(0) + 3
    caches = []
    for ops in (NATIVE, REFERENCE):
        cache = ops.new_kv_cache(8, BLOCK, LATENT, ROPE, dtype, torch.device("cpu"), "nd")
        write_kv = kv_cache.write_kv if ops is NATIVE else reference.write_kv
        write_kv(cache, latent, rope, slots)
        caches.append(cache)
    return caches


def test_cache_holds_what_was_written() -> None:
    torch.manual_seed(0)
    (latent, rope), (joined,) = filled_caches(torch.float32, 100)
    assert torch.equal(torch.cat((latent, rope), dim=-1), joined)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_over_pages(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    caches = filled_caches(dtype, 120)
    lens = np.array([1, 40, 17])
    tables = torch.tensor([[5, 0, 0], [1, 7, 2], [3, 4, 0]], dtype=torch.int32)
    q_latent, q_rope = torch.randn(3, HEADS, LATENT, dtype=dtype), torch.randn(3, HEADS, ROPE, dtype=dtype)
    outs = [
        ops.mla_decode(
            q_latent, q_rope, cache, DecodeMetadata(lens, torch.from_numpy(lens).int(), tables, BLOCK), scale=0.15
        )
        for ops, cache in zip((NATIVE, REFERENCE), caches, strict=True)
    ]
    assert_close(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_of_prompts_and_of_later_chunks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    caches = filled_caches(dtype, 120)
    query_lens, seq_lens = np.array([5, 3, 20]), np.array([5, 37, 20])
    tables = torch.tensor([[5, 0, 0], [1, 7, 2], [3, 4, 0]], dtype=torch.int32)
    num_tokens = int(query_lens.sum())
    q_nope = torch.randn(num_tokens, HEADS, NOPE, dtype=dtype)
    q_rope = torch.randn(num_tokens, HEADS, ROPE, dtype=dtype)
    kv_b = torch.randn(HEADS, NOPE + VALUE, LATENT, dtype=dtype) / LATENT**0.5
    outs = []
    for ops, cache in zip((NATIVE, REFERENCE), caches, strict=True):
        cu = torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens)))).int()
        meta = PrefillMetadata(query_lens, seq_lens, cu, torch.from_numpy(seq_lens).int(), tables, BLOCK)
        outs.append(ops.mla_prefill(q_nope, q_rope, kv_b, cache, meta, 0.15))
        assert_close(ops.mla_prefill(q_nope, q_rope, kv_b, cache, meta, 0.15), outs[-1])  # the next layer of the step
    assert_close(*outs)


@pytest.mark.parametrize("normalize", [True, False])
def test_router(normalize: bool) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 8), torch.randn(8)
    by_expert = []
    for ops in (NATIVE, REFERENCE):
        weights, ids = ops.topk_router(logits, bias, 2, 4, 2, normalize, 2.5)
        assert weights.dtype == torch.float32 and ids.dtype == torch.int64
        by_expert.append(torch.zeros(9, 8).scatter(1, ids, weights))
    assert_close(*by_expert)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "num_here"), [(0, 8), (2, 3), (7, 1)])
def test_experts_of_one_rank(dtype: torch.dtype, first: int, num_here: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 16, dtype=dtype)
    w13, w2 = torch.randn(num_here, 24, 16, dtype=dtype) / 4, torch.randn(num_here, 16, 12, dtype=dtype) / 4
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(9)])
    weights = torch.rand(9, 3)
    assert_close(*(ops.fused_experts(x, w13, w2, weights, ids, first) for ops in (NATIVE, REFERENCE)))
    none = NATIVE.fused_experts(x[:0], w13, w2, weights[:0], ids[:0], first)
    assert none.shape == (0, 16)
