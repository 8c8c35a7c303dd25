"""Weights as panels of pairs: values, products and engines are those of plain weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import CONFIGS, write_model
from vllm import LLM, SamplingParams
from vllm.ops.contract import RolloutOps
from vllm.ops.cpu.calls import Bfloat16Products
from vllm.ops.cpu.panels import PanelWeight, is_worth_panels
from vllm.ops.cpu.table import cpu_table

BUILDS_KERNELS = True  # when it is imported (tests/compiler.py)
TABLES = {products.name: cpu_table(products) for products in (Bfloat16Products.DOT, Bfloat16Products.WIDENED)}
LARGE = {"vocab_size": 640, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 160, "head_dim": 64}


def normal(*shape: int) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * 0.05).bfloat16()


def panels_of(values_EOI: Tensor, part_rows: list[int]) -> PanelWeight:
    packed = PanelWeight(len(values_EOI), part_rows, values_EOI.shape[2])
    for expert, values_OI in enumerate(values_EOI):
        for part, values in enumerate(values_OI.split(part_rows)):
            packed.matrix(expert, part).write(values)
    return packed


def test_values_are_read_back_bit_for_bit() -> None:
    values = normal(3, 224, 70)
    packed = panels_of(values, [64, 32, 128])
    for expert in range(3):
        found = [packed.matrix(expert, part).read() for part in range(3)]
        assert torch.equal(torch.cat(found), values[expert])
    assert packed.memory.nbytes == values.nbytes and packed.matrix(1, 2).shape == (128, 70)


def test_what_panels_are_for() -> None:
    assert is_worth_panels([2048, 1024, 1024], 1024, 1) and is_worth_panels([96, 96], 256, 128)
    assert not is_worth_panels([64], 64, 1)  # small
    assert not is_worth_panels([2048, 1000], 1024, 1) and not is_worth_panels([2048], 1023, 1)  # not whole panels


@pytest.mark.parametrize("rows", [1, 5, 14, 33, 130, 300])
@pytest.mark.parametrize("products", TABLES)
def test_products_are_those_of_the_values(products: str, rows: int) -> None:
    ops = TABLES[products]
    weight = normal(1, 224, 70)
    x = normal(rows, 80)[:, 5:75]
    assert torch.equal(ops.linear(x, panels_of(weight, [64, 32, 128])), ops.linear(x, weight[0]))
    w13, w2 = normal(4, 192, 64), normal(4, 64, 96)
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(rows)])
    weights, x = torch.rand(rows, 3), normal(rows, 64)
    found = ops.fused_experts(x, (panels_of(w13, [96, 96]), panels_of(w2, [64])), (weights, ids), 1)
    assert torch.equal(found, ops.fused_experts(x, (w13, w2), (weights, ids), 1))


def test_rows_are_looked_up() -> None:
    values = normal(1, 224, 70)
    ids = torch.tensor([0, 31, 32, 223, 100, 31])
    assert torch.equal(TABLES["DOT"].embedding(ids, panels_of(values, [224])), values[0, ids])


def packed_dot() -> RolloutOps:
    return TABLES["DOT"]


def packed_widened() -> RolloutOps:
    return TABLES["WIDENED"]


def plain_dot() -> RolloutOps:
    return replace(packed_dot(), new_weight=partial(packed_dot().new_weight, may_pack=False))


def plain_widened() -> RolloutOps:
    return replace(packed_widened(), new_weight=partial(packed_widened().new_weight, may_pack=False))


@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3-moe"])
@pytest.mark.parametrize("products", ["dot", "widened"])
def test_an_engine_answers_as_with_plain_weights(name: str, products: str, tmp_path: Path) -> None:
    """Loaded, digested, asleep and awake again, in captured steps."""
    path = str(write_model(tmp_path, CONFIGS[name] | LARGE, seed=3, dtype=torch.bfloat16)[0])
    prompts: list[Any] = [{"prompt_token_ids": [2 + i, 5, 7 * i + 1]} for i in range(5)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    found = []
    for form in ("plain", "packed"):
        arguments = {"skip_tokenizer_init": True, "max_model_len": 32, "dtype": "bfloat16", "enforce_eager": False}
        llm = LLM(path, rollout_ops=f"{__name__}:{form}_{products}", num_gpu_blocks_override=64, **arguments)
        model = llm.core.worker.model
        for layer in (model.layers[0].self_attn, model.embed_tokens, model.lm_head):
            packed = any(isinstance(module, PanelWeight) for module in layer.modules())
            assert packed == (form == "packed")
        one = [[(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in llm.generate(prompts, params)]]
        one.append(llm.weights_digest())
        llm.sleep(1)
        llm.wake_up()
        one.append([(o.outputs[0].token_ids, o.outputs[0].sampled_logprobs) for o in llm.generate(prompts, params)])
        assert one[0] == one[2]
        found.append(one)
    assert found[0] == found[1]
