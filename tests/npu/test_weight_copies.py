"""W_UK and W_UV as contiguous copies: no product of a decode step copies an operand, and new weights reach them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import npusim
import pytest
import torch
from torch import Tensor

from tests.npu.test_graphs import build_npu
from tests.vllm.test_graphs import captured_sizes, results_of
from tests.vllm.test_update_shards import cut, write_tiles
from tests.vllm.test_update_weights import digests
from tests.vllm.tiny import TINY, random_weights, write_checkpoint
from vllm import LLM
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.model_loader.digest import differences
from vllm_ascend.ops import rollout_ops

WITHOUT = replace(rollout_ops(), copies_strided_weights=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def layers_of(llm: LLM) -> list[MultiHeadLatentAttention]:
    return [m for m in llm.core.worker.model.modules() if isinstance(m, MultiHeadLatentAttention)]


def copies_of(llm: LLM) -> list[Tensor]:
    return [tensor for layer in layers_of(llm) if layer.absorbed is not None for tensor in layer.absorbed.tensors]


def assert_copies_follow(llm: LLM, seed: int) -> None:
    """The copies hold the rows of the checkpoint of this seed, and digests those of the original weights."""
    weights = random_weights(TINY, seed)
    for index, layer in enumerate(layers_of(llm)):
        kv_b = weights[f"model.layers.{index}.self_attn.kv_b_proj.weight"]
        parts = kv_b.view(layer.num_heads, -1, kv_b.shape[1]).split((24, 20), dim=1)
        assert layer.absorbed is not None
        for copy, rows in zip(layer.absorbed.tensors, parts, strict=True):
            assert copy.is_contiguous() and torch.equal(copy.cpu(), rows)
    assert not differences(digests(weights), llm.shard_digests())


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_no_product_of_a_decode_step_copies_an_operand(path: str, enforce_eager: bool) -> None:
    results = {}
    for name, ops in (("copies", rollout_ops()), ("views", WITHOUT)):
        llm = build_npu(path, rollout_ops=ops, enforce_eager=enforce_eager)
        npusim.reset_calls()
        tokens, logprobs = results_of(llm)
        products = [call.types for call in npusim.typed_calls() if call.op == "aten::bmm"]
        assert products and any("strided" in types for types in products) == (name == "views")
        results[name] = tokens, logprobs
    assert results["copies"][0] == results["views"][0]
    assert torch.equal(results["copies"][1], results["views"][1])


def test_copies_sleep_and_are_counted_with_the_weights(path: str) -> None:
    llm, without = build_npu(path), build_npu(path, rollout_ops=WITHOUT)
    more = llm.get_memory_report()["weights_bytes"] - without.get_memory_report()["weights_bytes"]
    assert more == sum(layer.kv_b.nbytes for layer in layers_of(llm)) == sum(copy.nbytes for copy in copies_of(llm))
    assert copies_of(without) == []
    expected = results_of(llm)[0]
    for level in (1, 2):
        llm.sleep(level)
        assert llm.get_memory_report()["weights_bytes"] == 0
        llm.wake_up()
        if level == 2:
            llm.load_weights(random_weights(TINY).items())
        assert_copies_follow(llm, seed=0)
        assert results_of(llm)[0] == expected


@pytest.mark.parametrize("way", ["load_weights", "update_weights", "update_weight_shards"])
def test_every_update_renews_the_copies_in_place(path: str, way: str, tmp_path: Path) -> None:
    """Captured steps go on with the new weights: they hold the copies' addresses."""
    llm = build_npu(path, enforce_eager=False)
    assert_copies_follow(llm, seed=0)
    old, addresses = results_of(llm)[0], [copy.data_ptr() for copy in copies_of(llm)]
    new = random_weights(TINY, seed=1)
    if way == "load_weights":
        for item in new.items():  # one by one, as a bucketed sync does
            llm.load_weights([item])
    elif way == "update_weights":
        llm.update_weights(new.items())
    else:
        write_tiles(llm, cut(new), version=1)
    assert_copies_follow(llm, seed=1)
    assert [copy.data_ptr() for copy in copies_of(llm)] == addresses and captured_sizes(llm) == [8]
    assert results_of(llm)[0] == results_of(build_npu(write_checkpoint(tmp_path, seed=1)))[0] != old
