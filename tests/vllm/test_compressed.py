"""Compressed weights: their values, their products and their life in an engine, each compared with plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.launcher import run_ranks
from tests.vllm.test_lifecycle import build, tokens_of
from tests.vllm.test_update_shards import cut, write_tiles
from tests.vllm.test_update_weights import digests
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.model_loader.digest import differences
from vllm.ops.cpu.calls import Bfloat16Products
from vllm.ops.cpu.compressed import CompressedWeight, is_worth_compressing
from vllm.ops.cpu.table import best_products, cpu_table

BUILDS_KERNELS = True  # when it is imported (tests/compiler.py)
HAS_TILES = best_products() is Bfloat16Products.TILES
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="only products by tiles (AMX) take compressed matrices")

LARGE: dict[str, Any] = {"hidden_size": 512, "moe_intermediate_size": 1024, "num_hidden_layers": 2}
UNCOMPRESSED_OPS = "vllm.ops.cpu:uncompressed_ops"
WIDE_NAME = "model.layers.1.mlp.experts.3.down_proj.weight"


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()


def wide(*shape: int) -> Tensor:
    """Magnitudes over 2^60."""
    exponents = torch.randint(-60, 1, shape, generator=torch.Generator().manual_seed(1))
    return torch.ldexp(normal(*shape).float(), exponents).bfloat16()


def with_some(*values: float) -> Callable[..., Tensor]:
    """A few of each among normal ones, never more than fifteen in 16 x 128."""

    def make(rows: int, columns: int) -> Tensor:
        matrix = normal(rows, columns)
        for place, value in enumerate(values):
            matrix[place :: 2 * len(values) + 8, 31::64] = value
        return matrix

    return make


def all_bits(rows: int, columns: int) -> Tensor:
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=torch.Generator().manual_seed(2))
    return bits.to(torch.int16).view(torch.bfloat16)


VALUES: dict[str, tuple[Callable[..., Tensor], bool]] = {  # and whether they fit the format
    "normal": (normal, True),
    "zeros": (torch.zeros, True),
    "few zeros, denormals and small ones": (with_some(0.0, -0.0, 1e-39, 2e-12), True),
    "few inf and nan": (with_some(float("inf"), float("-inf"), float("nan")), True),
    "a few large ones": (with_some(3e38, -1e20), True),
    "wide": (wide, False),
    "all bits": (all_bits, False),
}


@pytest.mark.parametrize("shape", [(16, 32), (48, 160), (64, 256), (512, 416)])
@pytest.mark.parametrize("kind", list(VALUES))
def test_values_are_read_back_bit_for_bit(kind: str, shape: tuple[int, int]) -> None:
    make, fits = VALUES[kind]
    values = make(*shape).to(torch.bfloat16)
    matrices = CompressedWeight(2, 1, *shape)
    matrices.write(0, normal(*shape))
    matrices.write(1, values)
    assert torch.equal(matrices.read(1).view(torch.int16), values.view(torch.int16))
    assert torch.equal(matrices.read(0), normal(*shape))
    assert (list(matrices.uncompressed) == []) == fits
    matrices.write(1, normal(*shape))
    assert not matrices.uncompressed and torch.equal(matrices.read(1), normal(*shape))


def test_compression_takes_three_quarters_of_the_bytes() -> None:
    matrices = CompressedWeight(1, 2, 1408, 2048)  # Moonlight's experts
    assert matrices.memory.numel() / (2 * 2 * 1408 * 2048) == (4 * 768 + 64) / 4096
    assert is_worth_compressing(1408, 2048) and is_worth_compressing(2048, 7168)
    assert not is_worth_compressing(128, 256)  # small
    assert not is_worth_compressing(1000, 2048) and not is_worth_compressing(2048, 1000)  # not whole tiles
    assert is_worth_compressing(2064, 1024) and not is_worth_compressing(2064, 1024, both_ways=True)


@needs_tiles
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 70, 300])
@pytest.mark.parametrize(("hidden", "width"), [(512, 512), (160, 48 * 2)])
def test_products_are_those_of_the_values(rows: int, hidden: int, width: int) -> None:
    """Few rows of an expert and many; matrices that fit the format beside one that does not."""
    ops, experts = cpu_table(Bfloat16Products.TILES), 4
    generator = torch.Generator().manual_seed(rows)
    w13 = (torch.randn(experts, 2 * width, hidden, generator=generator) * 0.05).bfloat16()
    w2 = (torch.randn(experts, hidden, width, generator=generator) * 0.05).bfloat16()
    w13[1, width:], w2[2] = wide(width, hidden), wide(hidden, width)
    packed13, packed2 = CompressedWeight(experts, 2, width, hidden), CompressedWeight(experts, 1, hidden, width)
    for expert in range(experts):
        packed13.matrix(expert, 0).write(w13[expert, :width])
        packed13.matrix(expert, 1).write(w13[expert, width:])
        packed2.matrix(expert, 0).write(w2[expert])
    assert list(packed13.uncompressed) == [3] and list(packed2.uncompressed) == [2]
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(rows)])  # two experts are elsewhere
    weights = torch.rand(rows, 3, generator=generator)
    found = ops.fused_experts(x, (packed13, packed2), (weights, ids), 1)
    assert torch.equal(found, ops.fused_experts(x, (w13, w2), (weights, ids), 1))


@needs_tiles
@pytest.mark.parametrize("rows", [1, 16, 40, 64, 300])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_linear_products_are_those_of_the_values(rows: int, parts: int) -> None:
    ops = cpu_table(Bfloat16Products.TILES)
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(parts * 112, 288, generator=generator) * 0.05).bfloat16()
    weight[112 * (parts - 1) :] = wide(112, 288)
    compressed = CompressedWeight(1, parts, 112, 288)
    for part in range(parts):
        compressed.matrix(0, part).write(weight[part * 112 : (part + 1) * 112])
    assert list(compressed.uncompressed) == [parts - 1]
    x = torch.randn(rows, 300, generator=generator).bfloat16()[:, 5:293]
    assert torch.equal(ops.linear(x, compressed), ops.linear(x, weight))


def weights_of(seed: int) -> dict[str, Tensor]:
    """In bf16 but for the router, with one matrix that does not fit the format in odd versions."""
    weights = random_weights(TINY | LARGE, seed)
    weights = {name: w if ".mlp.gate." in name else w.bfloat16() for name, w in weights.items()}
    if seed % 2:
        weights[WIDE_NAME] = wide(*weights[WIDE_NAME].shape)
    return weights


def num_uncompressed(llm: Any) -> int:
    moe = next(module for module in llm.core.worker.model.modules() if isinstance(module, FusedMoE))
    assert isinstance(moe.w2, CompressedWeight)
    return len(moe.w2.uncompressed)


@needs_tiles
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_an_engine_answers_as_with_plain_weights(enforce_eager: bool, tmp_path: Path) -> None:
    """Through weight updates of both kinds, matrices that stop and begin to fit, and sleep of both levels."""
    path = write_checkpoint(tmp_path, **LARGE)
    args = {"dtype": "bfloat16", "enforce_eager": enforce_eager}
    plain, compressed = build(path, rollout_ops=UNCOMPRESSED_OPS, **args), build(path, **args)
    first = tokens_of(plain)
    assert tokens_of(compressed) == first and num_uncompressed(compressed) == 0
    assert compressed.weights_digest() == plain.weights_digest()
    experts, shared = (count * 3 * 2 * 512 * 1024 for count in (TINY["n_routed_experts"], TINY["n_shared_experts"]))
    saved = plain.get_memory_report()["weights_bytes"] - compressed.get_memory_report()["weights_bytes"]
    assert saved == (experts + shared) * 15 // 64

    for version in (1, 2, 3):
        for llm in (plain, compressed):
            if version == 2:
                llm.update_weights(weights_of(version).items())
            else:
                write_tiles(llm, cut(weights_of(version), 170, 230), version=version)
        assert tokens_of(compressed) == tokens_of(plain) != first
        assert num_uncompressed(compressed) == version % 2
        assert not differences(digests(weights_of(version)), compressed.shard_digests())
    expected = tokens_of(compressed)
    compressed.sleep(1)
    assert compressed.get_memory_report()["weights_bytes"] == 0
    compressed.wake_up()
    assert tokens_of(compressed) == expected
    compressed.sleep(2)
    compressed.wake_up()
    compressed.update_weights(weights_of(2).items())
    plain.update_weights(weights_of(2).items())
    assert tokens_of(compressed) == tokens_of(plain) and num_uncompressed(compressed) == 0


@needs_tiles
def test_a_flipped_bit_shows_and_an_update_must_be_whole(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path, **LARGE), dtype="bfloat16")
    slices = list(cut(weights_of(2), 170, 230))
    write_tiles(llm, slices, version=1)
    before = llm.shard_digests()
    moe = next(module for module in llm.core.worker.model.modules() if isinstance(module, FusedMoE))
    assert isinstance(moe.w13, CompressedWeight)
    moe.w13.memory[5, 3000] ^= 4
    assert len(differences(before, llm.shard_digests())) == 1
    some = next(part for part in slices if part.hf_name == WIDE_NAME)
    with pytest.raises(ValueError, match=rf"{WIDE_NAME} \(\d+ of 524288 elements came\)"):
        write_tiles(llm, [part for part in slices if part is not some], version=2)


def run_both(path: str, layouts: list[dict[str, Any]]) -> list[tuple[list[list[int]], list[list[int]], bool]]:
    """Tokens with plain and with compressed weights, and whether the digests are the same."""
    results = []
    for layout in layouts:
        args = {"dtype": "bfloat16", **layout}
        plain, compressed = build(path, rollout_ops=UNCOMPRESSED_OPS, **args), build(path, **args)
        assert num_uncompressed(compressed) == 0
        results.append((tokens_of(plain), tokens_of(compressed), plain.weights_digest() == compressed.weights_digest()))
        plain.shutdown(), compressed.shutdown()
    return results


@needs_tiles
def test_experts_over_ranks(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, **LARGE)
    experts = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for results in run_ranks(run_both, 2, path, [experts, experts | {"expert_exchange": "dispatch"}]):
        for plain, compressed, is_equal in results:
            assert plain == compressed and is_equal
