"""What planned kernels keep for the backward pass."""

from __future__ import annotations

import pytest
import torch

from tools.plan.ops import Routing, train_ops

TOKENS, HEADS, KEYS, VALUES = 96, 4, 192, 128


def kept_bytes(pads_values: bool) -> int:
    q, k, v = (
        torch.empty(TOKENS, HEADS, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for size in (KEYS, KEYS, VALUES)
    )
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ops = train_ops("npu", Routing(), pads_values)
        out = ops.core_attention(q, k, v, torch.tensor([0, TOKENS]), TOKENS, 0.1)
    assert out.shape == v.shape
    return sum(x.numel() * x.element_size() for x in kept)


def test_values_without_padding_keep_a_third_less_of_themselves_and_the_output() -> None:
    saved = kept_bytes(pads_values=True) - kept_bytes(pads_values=False)
    assert saved == pytest.approx(2 * TOKENS * HEADS * (KEYS - VALUES) * 2)
