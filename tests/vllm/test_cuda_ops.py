"""The op table of NVIDIA devices against the reference, on a CPU: Triton's interpreter runs its kernels."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels of the CUDA table are written in Triton, which this environment lacks")

from tests.vllm.test_non_finite import check_marks
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import DecodeMetadata, HeadNorms, KVCache, PrefillMetadata, RouterSettings, SamplingBatch
from vllm.ops.cuda.attention import Attention
from vllm.ops.cuda.experts import ExpertOps
from vllm.ops.cuda.fp8 import Fp8Products
from vllm.ops.cuda.launch import launch
from vllm.ops.cuda.rows import RowOps
from vllm.ops.cuda.table import cuda_table
from vllm.ops.reference import rollout_ops as reference_ops
from vllm.ops.reference_attention import mla_decode
from vllm.v1.sample.rng import position_keys, splitmix64, vocab_keys

assert os.environ["TRITON_INTERPRET"] == "1", "tests/conftest.py sets it before anything imports triton"

# An empty split has the logarithm -inf, and memory that no expert writes holds anything.
pytestmark = [
    pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value) encountered:RuntimeWarning"),
    pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, without which the CUDA table refuses to start"),
]

FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {FP32: 1e-5, BF16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", [pytest.param(FP32, marks=pytest.mark.slow), BF16], ids=["fp32", "bf16"])
ROWS, REFERENCE = RowOps(launch), reference_ops()
EXPERTS = ExpertOps(launch, ROWS, Fp8Products(launch))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Same shape and dtype; values within the dtype's tolerance of the largest one."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.isfinite().all()
    gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-3)
    assert gap <= TOLERANCE[expected.dtype], f"off by {gap:.2e} of the largest value"


def make_tables(seq_lens: list[int], block_size: int, spare_blocks: int = 2) -> tuple[Tensor, int]:
    """Block tables int32 [B, W] with scattered blocks and columns that no sequence needs; the number of blocks."""
    counts = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(counts) + spare_blocks).int()
    tables = ids[-1].repeat(len(seq_lens), max(counts) + 1)
    for row, part in zip(tables, ids[: sum(counts)].split(counts), strict=True):
        row[: len(part)] = part
    return tables, len(ids)


def decode_metadata(seq_lens: list[int], tables: Tensor, block_size: int) -> DecodeMetadata:
    lens = np.array(seq_lens)
    return DecodeMetadata(lens, torch.from_numpy(lens).int(), tables, block_size)


def prefill_metadata(lens: list[tuple[int, int]], tables: Tensor, block_size: int) -> PrefillMetadata:
    query_lens, seq_lens = np.array(lens).T
    ends = torch.from_numpy(np.concatenate(([0], query_lens.cumsum()))).int()
    return PrefillMetadata(query_lens, seq_lens, ends, torch.from_numpy(seq_lens).int(), tables, block_size)


def random_latents(num_blocks: int, block_size: int, latent: int, rope: int, dtype: torch.dtype) -> KVCache:
    (pages,) = REFERENCE.new_kv_cache(num_blocks, block_size, latent, rope, dtype, CPU, "nd")
    return (pages.normal_(),)


def random_keys_and_values(num_blocks: int, block_size: int, heads: int, channels: int, dtype: torch.dtype) -> KVCache:
    (pages,) = REFERENCE.new_gqa_cache(num_blocks, block_size, heads, channels, dtype, CPU)
    return (pages.normal_(),)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "block_size", "seq_lens"),
    [(1, 16, [1, 37]), (6, 64, [300, 1, 1, 130]), (16, 16, [70, 513]), (80, 16, [33, 2])],
)
def test_mla_decode(heads: int, block_size: int, seq_lens: list[int], dtype: torch.dtype) -> None:
    """Contexts of one token, of one tile, of several splits; heads of one tile and of two."""
    tables, num_blocks = make_tables(seq_lens, block_size)
    cache = random_latents(num_blocks, block_size, 24, 12, dtype)
    q = torch.randn(len(seq_lens), heads, 36).to(dtype)
    found, expected = (
        attend((q[..., :24], q[..., 24:]), cache, decode_metadata(seq_lens, tables, block_size), 0.3)
        for attend in (Attention(launch).mla_decode, mla_decode)
    )
    assert_near(found, expected)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "seq_lens"),
    [(1, 1, 16, [1, 37]), (6, 2, 64, [300, 1, 1, 130]), (32, 2, 16, [70, 300])],
)
def test_gqa_decode(heads: int, kv_heads: int, block_size: int, seq_lens: list[int], dtype: torch.dtype) -> None:
    tables, num_blocks = make_tables(seq_lens, block_size)
    cache = random_keys_and_values(num_blocks, block_size, kv_heads, 20, dtype)
    q = torch.randn(len(seq_lens), heads, 24).to(dtype)[..., :20]
    found, expected = (
        attend(q, cache, decode_metadata(seq_lens, tables, block_size), 0.3)
        for attend in (Attention(launch).gqa_decode, REFERENCE.gqa_decode)
    )
    assert_near(found, expected)


PREFILLS = pytest.mark.parametrize(
    ("block_size", "lens"),
    [(16, [(1, 1), (5, 37), (20, 20)]), (64, [(130, 140), (3, 3)]), (16, [(70, 70), (2, 150)])],
    ids=["short", "several tiles", "a long context"],
)


@DTYPES
@PREFILLS
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2)])
def test_gqa_prefill(
    block_size: int, lens: list[tuple[int, int]], heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    tables, num_blocks = make_tables([total for _, total in lens], block_size)
    cache = random_keys_and_values(num_blocks, block_size, kv_heads, 20, dtype)
    q = torch.randn(sum(new for new, _ in lens), heads, 20).to(dtype)
    found, expected = (
        attend(q, cache, prefill_metadata(lens, tables, block_size), 0.3)
        for attend in (Attention(launch).gqa_prefill, REFERENCE.gqa_prefill)
    )
    assert_near(found, expected)


@DTYPES
@pytest.mark.parametrize(
    ("block_size", "lens"),
    [(16, [(1, 1), (5, 37), (20, 20)]), (64, [(130, 140), (3, 3)]), (16, [(17, 70), (1, 1), (2, 150)])],
    ids=["short", "several tiles", "in latent space"],
)
def test_mla_prefill(
    block_size: int, lens: list[tuple[int, int]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few sequences, or a few tokens in latent space, at a time."""
    monkeypatch.setattr("vllm.ops.cuda.attention._EXPANDED_ELEMENTS", 3000)
    monkeypatch.setattr("vllm.ops.cuda.attention._LATENT_TOKENS", 15)
    tables, num_blocks = make_tables([total for _, total in lens], block_size)
    cache = random_latents(num_blocks, block_size, 40, 12, dtype)
    q = torch.randn(sum(new for new, _ in lens), 3, 22).to(dtype)
    kv_b = (torch.randn(3, 24, 40) / 40**0.5).to(dtype)
    meta, ours = prefill_metadata(lens, tables, block_size), Attention(launch)
    found = [ours.mla_prefill((q[..., :10], q[..., 10:]), kv_b, cache, meta, 0.3) for _ in range(2)]
    meta = prefill_metadata(lens, tables, block_size)
    expected = REFERENCE.mla_prefill((q[..., :10], q[..., 10:]), kv_b, cache, meta, 0.3)
    for layer in found:
        assert_near(layer, expected)


def make_angles(tokens: int, channels: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, channels // 2) * 6
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


@DTYPES
@pytest.mark.parametrize("size", [1, 40, 1000])
def test_norms(size: int, dtype: torch.dtype) -> None:
    x, weight, residual = torch.randn(3, size + 5).to(dtype)[:, 5:], torch.rand(size).to(dtype), torch.randn(3, size)
    assert_near(ROWS.rms_norm(x, weight, 1e-3), REFERENCE.rms_norm(x, weight, 1e-3))
    residual = residual.to(dtype)
    found = ROWS.add_rms_norm(x.clone(), residual, weight, 1e-3)
    expected = REFERENCE.add_rms_norm(x.clone(), residual, weight, 1e-3)
    assert_near(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@DTYPES
@pytest.mark.parametrize("width", [12, 1030])
def test_silu_and_mul(width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * width + 2) * 3).to(dtype)[:, 2:]
    assert_near(ROWS.silu_and_mul(x), REFERENCE.silu_and_mul(x))
    assert ROWS.silu_and_mul(x[:0]).shape == (0, width)


@DTYPES
@pytest.mark.parametrize("heads", [1, 6, 16])
def test_rotary(heads: int, dtype: torch.dtype) -> None:
    x, angles = torch.randn(5, heads, 15).to(dtype)[..., 3:], make_angles(5, 12)
    assert_near(ROWS.rotary_interleaved(x, angles), REFERENCE.rotary_interleaved(x, angles))


@DTYPES
def test_latents_are_written_to_their_slots(dtype: torch.dtype) -> None:
    kv, weight, angles = torch.randn(5, 39).to(dtype)[:, 3:], torch.rand(24).to(dtype), make_angles(5, 12)
    slots, pages = torch.tensor([7, 0, 45, 2, 5]), []
    for ops in (ROWS, REFERENCE):
        cache = REFERENCE.new_kv_cache(3, 16, 24, 12, dtype, CPU, "nd")
        ops.norm_rope_write_kv(cache, kv, weight, 1e-3, angles, slots)
        pages.append(cache[0])
    assert_near(*pages)
    assert torch.equal(pages[0].any(-1), pages[1].any(-1))


@DTYPES
@pytest.mark.parametrize("heads", [2, 14])
@pytest.mark.parametrize(("width", "is_biased", "is_normed"), [(20, False, True), (20, True, False), (12, True, True)])
def test_keys_and_values_are_written_to_their_slots(
    heads: int, width: int, is_biased: bool, is_normed: bool, dtype: torch.dtype
) -> None:
    """``width`` of a head's 20 channels are turned."""
    qkv = torch.randn(5, 3 + (heads + 4) * 20).to(dtype)[:, 3:].unflatten(1, (-1, 20))
    norms = HeadNorms(torch.rand(20).to(dtype), torch.rand(20).to(dtype), 1e-3) if is_normed else None
    bias = torch.randn(heads + 4, 20).to(dtype) if is_biased else None
    angles, slots, pages, queries = make_angles(5, width), torch.tensor([7, 0, 45, 2, 5]), [], []
    for ops in (ROWS, REFERENCE):
        cache = REFERENCE.new_gqa_cache(3, 16, 2, 20, dtype, CPU)
        queries.append(ops.rope_write_gqa(cache, qkv, bias, norms, angles, slots))
        pages.append(cache[0])
    assert_near(*queries)
    assert_near(*pages)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("experts", "groups", "kept_groups", "top_k"), [(8, 4, 2, 3), (20, 1, 1, 6), (12, 12, 5, 3), (48, 3, 1, 8)]
)
@pytest.mark.parametrize("is_normed", [True, False])
def test_topk_router(experts: int, groups: int, kept_groups: int, top_k: int, is_normed: bool, scoring: str) -> None:
    """Compares the weights by expert: the order of the choices is free."""
    settings = RouterSettings(top_k, groups, kept_groups, is_normed, 2.5, scoring)
    logits, bias = torch.randn(6, experts), torch.randn(experts) if scoring == "sigmoid" else None
    found, expected = (ops.topk_router(logits, bias, settings) for ops in (EXPERTS, REFERENCE))
    assert found[0].dtype == FP32 and found[1].dtype == torch.int64
    assert_near(*(torch.zeros_like(logits).scatter(1, ids, weights) for weights, ids in (found, expected)))


@pytest.mark.parametrize(
    ("dtype", "hidden", "width"), [(FP32, 24, 16), (BF16, 24, 16), (BF16, 35, 19)], ids=["fp32", "bf16", "odd bf16"]
)
@pytest.mark.parametrize(
    ("tokens", "first", "local", "most_choices"),
    [(40, 0, 7, 1000), (9, 2, 3, 100), (9, 7, 4, 100), (1, 0, 7, 100), (9, 1, 5, 7)],
    ids=["all here", "some elsewhere", "none here", "one token", "few at a time"],
)
def test_fused_experts(
    tokens: int,
    first: int,
    local: int,
    most_choices: int,
    dtype: torch.dtype,
    hidden: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expert 5 gets no token."""
    monkeypatch.setattr("vllm.ops.cuda.experts._MOST_CHOICES", most_choices)
    choices = torch.tensor([e for e in range(7) if e != 5])
    ids = torch.stack([choices[torch.randperm(6)[:3]] for _ in range(tokens)])
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    w13 = torch.randn(local, hidden, 2 * width).to(dtype).transpose(1, 2)
    w2 = torch.randn(local, width, hidden).to(dtype).transpose(1, 2)
    found = EXPERTS.fused_experts(x, (w13, w2), (weights, ids), first)
    assert_near(found, REFERENCE.fused_experts(x, (w13, w2), (weights, ids), first))
    empty = EXPERTS.fused_experts(x[:0], (w13, w2), (weights[:0], ids[:0]), first)
    assert empty.shape == (0, hidden)


@pytest.mark.parametrize("size", [1, 160, 5000])
@pytest.mark.parametrize("temperatures", [(0.0, 1.0, 0.7), (0.0, 0.0, 0.0), (1.0, 1.3, 0.2)])
def test_plain_draws(temperatures: tuple[float, ...], size: int) -> None:
    """Parts of a vocabulary whose tokens are all excluded, and several most likely tokens, included."""
    temperature, num_random = torch.tensor(temperatures).repeat(4), 4 * sum(t > 0 for t in temperatures)
    logits = torch.randn(12, size) * 3
    logits[3, :4096] = -1e9 if size > 4096 else 0.0
    logits[:, size // 2 :] = logits[:, size // 2 :].clamp(max=2)
    keys = torch.from_numpy(position_keys(splitmix64(np.arange(12, dtype=np.uint64)), np.arange(12)))
    vocabulary = torch.from_numpy(vocab_keys(size))
    batch = SamplingBatch(temperature, keys, vocabulary, None, None, None, num_random < 12, num_random > 0)
    found, expected = ROWS.sample(logits, batch), REFERENCE.sample(logits, batch)
    assert torch.equal(found.token_ids_B, expected.token_ids_B)
    torch.testing.assert_close(found.logprobs_B, expected.logprobs_B, rtol=1e-5, atol=1e-5)


def test_rows_with_logits_that_are_not_finite_are_marked() -> None:
    for temperature in (0.0, 0.7):
        check_marks(ROWS.sample, 5000, temperature)


@DTYPES
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_mla_decode_of_deepseeks_heads(heads: int, dtype: torch.dtype) -> None:
    seq_lens = [300, 1, 64]
    tables, num_blocks = make_tables(seq_lens, 64)
    cache = random_latents(num_blocks, 64, 512, 64, dtype)
    q = (torch.randn(3, heads, 576) / 5).to(dtype)
    found, expected = (
        attend((q[..., :512], q[..., 512:]), cache, decode_metadata(seq_lens, tables, 64), 0.1)
        for attend in (Attention(launch).mla_decode, mla_decode)
    )
    assert_near(found, expected)


@DTYPES
def test_exchanged_experts_of_one_rank(dtype: torch.dtype) -> None:
    """The last row is padding; between ranks the exchange is the reference's own."""
    x, weights, ids = torch.randn(5, 24).to(dtype), torch.rand(5, 2), torch.stack([torch.randperm(4)[:2]] * 5)
    w13 = torch.randn(4, 24, 32).to(dtype).transpose(1, 2)
    w2 = torch.randn(4, 16, 24).to(dtype).transpose(1, 2)
    alone = GroupCoordinator(0, 1, None)
    tables = cuda_table(launch), REFERENCE
    found, expected = (ops.exchanged_experts(x, (w13, w2), (weights, ids), 4, alone)[:4] for ops in tables)
    assert_near(found, expected)
