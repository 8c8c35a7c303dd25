"""New weights as a stream: every name accounted for, nothing kept of the stream, and digests of what has arrived."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mindspeed_llm.tiny import tiny_qwen3_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.vllm.test_lifecycle import build, tokens_of
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm.model_executor.model_loader.digest import (
    WeightDigest,
    _coefficients,
    copy_with_digests,
    differences,
    digest,
    slice_digest,
)

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def digests(weights: dict[str, Tensor]) -> dict[str, WeightDigest]:
    return {name: digest(name, tensor) for name, tensor in weights.items()}


def test_an_update_takes_every_name_once_and_sets_the_version(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path / "old"), enable_prefix_caching=True, block_size=4)
    old, expected = tokens_of(llm), tokens_of(build(write_checkpoint(tmp_path / "new", seed=1)))
    new = random_weights(TINY, seed=1)
    assert llm.policy_version == 0
    llm.update_weights(new.items(), version=7)
    assert llm.policy_version == 7 and tokens_of(llm) == expected != old
    skipped = [("model.layers.3.eh_proj.weight", torch.zeros(1))]  # multi-token prediction
    llm.update_weights([*random_weights(TINY).items(), *skipped])
    assert llm.policy_version == 8 and tokens_of(llm) == old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: [p for p in pairs if p[0] != EXPERT], f"1 weights were not loaded: {EXPERT}"),
        (lambda pairs: [*pairs, pairs[3]], "came twice"),
        (lambda pairs: [*pairs, ("model.layers.0.nonsense", torch.zeros(1))], "nonsense is unknown"),
        (lambda pairs: [(n, t[:-1] if n == EXPERT else t) for n, t in pairs], r"has shape \(31, 64\)"),
        (lambda pairs: [(n, t.to(torch.int32) if n == EXPERT else t) for n, t in pairs], "is torch.int32"),
        (lambda pairs: [*pairs, (f"{EXPERT}_scale_inv", torch.ones(1, 1))], "scales without their"),
    ],
    ids=["missing", "twice", "unknown", "shape", "dtype", "scale alone"],
)
def test_a_failed_update_leaves_an_engine_that_refuses(change: Any, message: str, tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    pairs = list(random_weights(TINY, seed=1).items())
    with pytest.raises(ValueError, match=message):
        llm.update_weights(change(pairs), version=1)
    assert llm.policy_version == 0
    with pytest.raises(RuntimeError, match="failed update"):
        tokens_of(llm)
    llm.update_weights(pairs, version=1)
    assert len(tokens_of(llm)) == 6


def test_a_load_that_fails_half_way_leaves_an_engine_that_refuses(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    pairs = list(random_weights(TINY, seed=1).items())
    with pytest.raises(ValueError, match="nonsense is unknown"):
        llm.load_weights([*pairs[:5], ("model.layers.0.nonsense", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="never loaded"):
        tokens_of(llm)
    llm.load_weights(pairs)
    assert len(tokens_of(llm)) == 6


def test_nothing_of_the_stream_is_kept(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    new = random_weights(TINY, seed=1)
    largest = max(tensor.numel() for tensor in new.values())
    shared = torch.empty(largest)
    alive: list[weakref.ref[Tensor]] = []

    def one_buffer() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in new.items():
            view = shared[: tensor.numel()].view(tensor.shape).copy_(tensor)
            alive.append(weakref.ref(view))
            yield name, view
            del view
            assert sum(ref() is not None for ref in alive[:-1]) == 0

    llm.update_weights(one_buffer(), version=1)
    shared.fill_(float("nan"))
    assert not differences(digests(new), llm.weights_digest())


def test_digests_add_up_and_show_every_change() -> None:
    generator = torch.Generator().manual_seed(0)
    cases = itertools.product((torch.float32, torch.bfloat16, torch.float8_e4m3fn), (EXPERT, "lm_head.weight"))
    for dtype, name in cases:
        whole = torch.randn(70, 90, generator=generator).to(dtype)
        value = digest(name, whole).value
        parts = [slice_digest(name, whole[:33, :50], (0, 0)), slice_digest(name, whole[33:, :50], (33, 0))]
        parts += [slice_digest(name, whole[:, 50:].T.contiguous().T, (0, 50))]
        assert int(sum(parts)) % 2**64 == value
        for row, column in ((0, 0), (69, 89), (31, 7)):
            changed = whole.clone()
            changed.view(torch.uint8)[row, column * dtype.itemsize] ^= 1
            assert digest(name, changed).value != value
        swapped = whole.clone()
        swapped[3], swapped[5] = whole[5], whole[3]
        transposed = whole[:70, :70].T.contiguous()
        assert digest(name, swapped).value != value
        assert digest(name, transposed).value != digest(name, whole[:70, :70]).value
    huge = torch.randn(3, 1 << 20, generator=generator)
    halves = slice_digest(name, huge[:, :9], (0, 0)) + slice_digest(name, huge[:, 9:], (0, 9))
    assert int(halves) % 2**64 == digest(name, huge).value
    across = torch.empty(1 << 20, 3).T  # the other order of memory
    total = torch.zeros((), dtype=torch.int64)
    copy_with_digests(name, across, huge, (0, 0), of_target=total)
    assert int(total) % 2**64 == digest(name, huge).value == digest(name, across).value and across.equal(huge)


@pytest.mark.parametrize("is_native", [True, False])
def test_digests_add_up_over_tiles_in_any_order_of_memory(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr("vllm.model_executor.model_loader.digest._native", lambda: None)
    generator = torch.Generator().manual_seed(0)
    for dtype, name, rows, columns in itertools.product(
        (torch.float32, torch.bfloat16, torch.float8_e4m3fn), (EXPERT, "lm_head.weight"), (1, 3, 64), (1, 2, 300)
    ):
        whole = torch.randn(rows, columns, generator=generator).to(dtype)
        bands = whole if name == "lm_head.weight" else whole.T
        elements = bands.clone(memory_format=torch.contiguous_format).view(torch.uint8).long().view(len(bands), -1)
        r_P, c_QB = _coefficients(name, bands, (0, 0))
        expected = int(((elements * c_QB.flatten()).sum(1) * r_P).sum()) % 2**64
        spread = torch.zeros(rows + 1, 2 * columns).to(dtype)
        spread[1:, ::2] = whole
        for laid_out in (whole, whole.T.clone(memory_format=torch.contiguous_format).T, spread[1:, ::2]):
            tiles = [
                slice_digest(name, laid_out[row : row + 2, column : column + 77], (row, column))
                for row in range(0, rows, 2)
                for column in range(0, columns, 77)
            ]
            assert int(torch.stack(tiles).sum()) % 2**64 == expected == digest(name, laid_out).value
            for target in (torch.zeros_like(whole), torch.zeros(columns, rows).to(dtype).T):
                for has_values, has_target in itertools.product((False, True), repeat=2):
                    target.zero_()
                    totals = torch.zeros(2, dtype=torch.int64)
                    of_values, of_target = totals[0] if has_values else None, totals[1] if has_target else None
                    copy_with_digests(name, target, laid_out, (0, 0), of_values=of_values, of_target=of_target)
                    assert bool((target.float() == whole.float()).all())
                    assert [int(total) % 2**64 for total in totals] == [has_values * expected, has_target * expected]


def digests_of_layouts(cases: list[tuple[str, int | None, dict[str, Any]]]) -> list[dict[str, WeightDigest]]:
    """For each (checkpoint, seed of the weights it is updated with, layout)."""
    found = []
    for path, seed, layout in cases:
        llm = build(path, **layout)
        if seed is not None:
            llm.update_weights(random_weights(TINY, seed).items(), version=1)
        found.append(llm.weights_digest())
        llm.shutdown()
    return found


LAYOUTS = {
    2: [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {},
    ],
    4: [{"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_digests_are_those_of_the_whole_tensors_in_every_layout(world_size: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "deepseek")
    cases: list[tuple[str, int | None, dict[str, Any]]] = [(path, 1, layout) for layout in LAYOUTS[world_size]]
    expected = {path: digests(random_weights(TINY, seed=1))}
    if world_size == 2:  # both ranks hold the only head of keys and values
        config, qwen3 = tiny_qwen3_config(num_key_value_heads=1, tie_word_embeddings=True), tmp_path / "qwen3"
        expected[str(qwen3)] = digests(write_tiny_checkpoint(qwen3, config, seed=3, dtype=torch.float32))
        cases.append((str(qwen3), None, {"tensor_parallel_size": 2, "dtype": "float32"}))
    for found in run_ranks(digests_of_layouts, world_size, cases):
        for (directory, _, layout), of_layout in zip(cases, found, strict=True):
            assert not differences(expected[directory], of_layout), (directory, layout)


def test_a_wrong_weight_is_named(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    weights = random_weights(TINY)
    norm = weights["model.norm.weight"]
    llm.load_weights([("model.norm.weight", norm.where(torch.arange(len(norm)) != 3, norm + 1e-6))])
    (problem,) = differences(digests(weights), llm.weights_digest())
    assert problem.startswith("model.norm.weight: float32 [64]")
    llm.sleep(2)
    with pytest.raises(RuntimeError, match="wake_up"):
        llm.weights_digest()


def test_digests_are_taken_in_the_engine_s_dtype(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path), dtype="bfloat16")
    found = llm.weights_digest()
    gate = "model.layers.1.mlp.gate.weight"
    assert found[gate].dtype == torch.float32 and found[EXPERT].dtype == torch.bfloat16
    assert found[EXPERT] == digest(EXPERT, random_weights(TINY)[EXPERT].bfloat16())
