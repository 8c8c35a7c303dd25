"""Each Ascend training op equals its reference, forward and backward, on the stand-in for torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.ops.reference import reference_ops
from megatron.core.ops.resolve import resolve
from mindspeed.ops import train_ops
from tests.npu.ops_under_test import torch_npu_stand_in

__all__ = ["torch_npu_stand_in"]
pytestmark = pytest.mark.usefixtures("torch_npu_stand_in")

NATIVE, REFERENCE = train_ops(), reference_ops()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def run(op: Callable[..., Any], inputs: list[Any]) -> list[torch.Tensor]:
    """The op's output and the gradients of its floating inputs, for one fixed gradient of the output."""
    inputs = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]
    out = op(*inputs)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(x.grad for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad)]


def assert_equal_ops(native: Callable[..., Any], reference: Callable[..., Any], inputs: list[Any]) -> None:
    for ours, theirs in zip(run(native, inputs), run(reference, inputs), strict=True):
        assert ours is not None and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        scale = theirs.abs().max().clamp_min(1e-3)
        assert (ours - theirs).abs().max() <= TOLERANCE[theirs.dtype] * scale


def test_the_table_is_complete_and_found_by_its_provider() -> None:
    table = resolve("mindspeed.ops:train_ops")
    assert set(table.names) == set(REFERENCE.names)
    assert all(kind.split()[0] in ("native", "reference") for kind in table.names.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [leaf(6, 32, dtype=dtype), leaf(32, dtype=dtype), 1e-6]
    assert_equal_ops(NATIVE.rms_norm, REFERENCE.rms_norm, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_equal_ops(NATIVE.swiglu, REFERENCE.swiglu, [leaf(6, 64, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_keeps_products_of_queries_with_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    angles = torch.rand(6, 4) * 6
    inputs = [leaf(6, 2, 8, dtype=dtype), leaf(6, 2, 8, dtype=dtype)]

    def product(rotary: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda q, k: torch.einsum("qnd,knd->nqk", *(rotary(x, angles.cos(), angles.sin()) for x in (q, k)))

    assert_equal_ops(product(NATIVE.rotary_interleaved), product(REFERENCE.rotary_interleaved), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_with_mla_head_sizes(dtype: torch.dtype, is_causal: bool) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    inputs = [leaf(13, 2, 24, dtype=dtype), leaf(13, 2, 24, dtype=dtype), leaf(13, 2, 16, dtype=dtype)]
    inputs += [ends, 7, 0.2, is_causal]
    assert_equal_ops(NATIVE.core_attention, REFERENCE.core_attention, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[4, 0, 6], [0, 0, 10], [3, 3, 4]])
def test_grouped_matmul_with_idle_experts(dtype: torch.dtype, counts: list[int]) -> None:
    torch.manual_seed(0)
    inputs = [leaf(10, 16, dtype=dtype), leaf(3, 16, 8, dtype=dtype), torch.tensor(counts)]
    assert_equal_ops(NATIVE.grouped_matmul, REFERENCE.grouped_matmul, inputs)


def test_grouped_matmul_without_any_token() -> None:
    inputs = [leaf(0, 16), leaf(3, 16, 8), torch.zeros(3, dtype=torch.int64)]
    out, grad_x, grad_w = run(NATIVE.grouped_matmul, inputs)
    assert out.shape == (0, 8) and grad_x.shape == (0, 16) and not grad_w.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_probs", [True, False])
def test_permute_and_unpermute(dtype: torch.dtype, has_probs: bool) -> None:
    torch.manual_seed(0)
    indices = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    probs = torch.rand(7, 3).requires_grad_() if has_probs else None

    def there_and_back(ops: Any) -> Callable[..., torch.Tensor]:
        def both(tokens: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
            rows, row_map = ops.token_permute(tokens, indices)
            scaled = rows * torch.arange(1, len(rows) + 1, dtype=rows.dtype).unsqueeze(1)
            return ops.token_unpermute(scaled, row_map, probs, topk=3)

        return both

    inputs = [leaf(7, 8, dtype=dtype), indices, probs]
    assert_equal_ops(there_and_back(NATIVE), there_and_back(REFERENCE), inputs)


def test_permute_without_any_token() -> None:
    tokens = leaf(0, 8)
    rows, row_map = NATIVE.token_permute(tokens, torch.zeros(0, 2, dtype=torch.int64))
    out = NATIVE.token_unpermute(rows, row_map, torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 8) and tokens.grad is not None


@pytest.mark.parametrize(
    "choice",
    [
        {"topk": 2, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5},
        {"topk": 3, "score_function": "sigmoid", "norm_topk_prob": False},
        {"topk": 1, "score_function": "sigmoid"},
        {"topk": 2, "score_function": "softmax"},
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_router(choice: dict[str, Any], has_bias: bool) -> None:
    torch.manual_seed(0)
    bias = torch.randn(8) if has_bias else None

    def by_expert(router: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def weights(logits: torch.Tensor) -> torch.Tensor:
            probs, indices = router(logits, expert_bias=bias, **choice)
            assert indices.dtype == torch.int64
            return torch.zeros_like(logits).scatter(1, indices, probs)

        return weights

    assert_equal_ops(by_expert(NATIVE.topk_router), by_expert(REFERENCE.topk_router), [leaf(9, 8)])


def test_adamw_over_several_steps() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(37), torch.zeros(37), torch.zeros(37)]
    theirs = [x.clone() for x in ours]
    for step in range(1, 4):
        grad = torch.randn(37)
        for op, (param, exp_avg, exp_avg_sq) in ((NATIVE.adamw_step, ours), (REFERENCE.adamw_step, theirs)):
            op(param, grad, exp_avg, exp_avg_sq, step=step, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
