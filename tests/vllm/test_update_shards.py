"""New weights as slices: cut anyhow, every element accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.vllm.fp8_tiny import WIDE, fp8_tensors
from tests.vllm.test_lifecycle import build, tokens_of
from tests.vllm.test_update_weights import EXPERT, digests
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM
from vllm.model_executor.model_loader.digest import WeightDigest, differences


class Tile(NamedTuple):
    hf_name: str
    starts: tuple[int, ...]
    values: Tensor


def write_tiles(llm: LLM, tiles: Iterable[Tile], version: int) -> dict[str, WeightDigest]:
    """Update the weights; returns the digests taken on the way."""
    with llm.update_weight_shards(version) as writer:
        for name, starts, values in tiles:
            stops = (start + size for start, size in zip(starts, values.shape, strict=True))
            writer.write(name, tuple(zip(starts, stops, strict=True)), values)
    return writer.digests


def cut(weights: dict[str, Tensor], rows: int = 17, columns: int = 23) -> Iterator[Tile]:
    """Every weight in tiles, the last first."""
    for name, weight in reversed(weights.items()):
        for first in range(0, len(weight), rows):
            band = weight[first : first + rows]
            if weight.dim() == 1:
                yield Tile(name, (first,), band)
                continue
            for column in range(0, weight.shape[1], columns):
                yield Tile(name, (first, column), band[:, column : column + columns])


def test_slices_are_the_weights(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path / "old"), enable_prefix_caching=True, block_size=4)
    expected = tokens_of(build(write_checkpoint(tmp_path / "new", seed=1)))
    new = random_weights(TINY, seed=1)
    arrived = write_tiles(llm, cut(new), version=7)
    assert llm.policy_version == 7 and tokens_of(llm) == expected
    assert not differences(digests(new), llm.shard_digests()) and arrived == llm.shard_digests()


def test_fp8_slices_come_quantised(tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path, **WIDE), quantization="fp8")
    stored = fp8_tensors(random_weights(WIDE, seed=1))
    write_tiles(llm, cut(stored), version=1)
    assert not differences(digests(stored), llm.shard_digests())
    with pytest.raises(ValueError, match="quantise before it is cut"):
        write_tiles(llm, cut(random_weights(WIDE)), version=2)


SLICES = list(cut(random_weights(TINY, seed=1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[1:], r"lm_head.weight \(9849 of 10240 elements came\)"),
        (lambda s: [*s, s[3]], "came before in this update"),
        (lambda s: [*s, Tile("model.layers.0.nonsense", (0,), torch.zeros(1))], "nonsense is unknown"),
        (lambda s: [*s, Tile(EXPERT, (31, 60), torch.zeros(2, 2))], r"slice \(\(31, 33\), \(60, 62\)\) came"),
        (lambda s: [*s, Tile(EXPERT, (0,), torch.zeros(2))], "has 2 dimensions"),
        (lambda s: [s[0]._replace(values=s[0].values.to(torch.int32)), *s[1:]], "is torch.int32"),
        (
            lambda s: [s[0]._replace(values=s[0].values / 0), *s[1:]],
            r"the update has NaN .* in 1 tensors: lm_head\.weight",
        ),
    ],
    ids=["missing", "twice", "unknown", "outside", "dimensions", "dtype", "non_finite"],
)
def test_a_failed_update_leaves_an_engine_that_refuses(change: Any, message: str, tmp_path: Path) -> None:
    llm = build(write_checkpoint(tmp_path))
    with pytest.raises(ValueError, match=message):
        write_tiles(llm, change(SLICES), version=1)
    assert llm.policy_version == 0
    with pytest.raises(RuntimeError, match="failed update"):
        tokens_of(llm)
    write_tiles(llm, SLICES, version=1)
    assert len(tokens_of(llm)) == 6
