"""What the tests of the CUDA table share: the reference, tolerances, and comparisons of both with gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.ops import TrainOps, reference_ops

MARKS = [
    pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, and flash attention with packed log-sum-exps"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: requirements/dev.txt has it where it has wheels, on Linux",
    ),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),  # numpy's interpreter
]

REFERENCE = reference_ops()
# The contract's. The interpreter cuts float32 to bfloat16 where a GPU rounds, which doubles that error.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
ROUTERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk": 4, "num_groups": 4, "group_topk": 2, "score_function": "sigmoid", "scaling_factor": 2.5},
    "deepseek_v2": {"topk": 3, "num_groups": 4, "group_topk": 2, "pre_softmax": True},
    "odd": {"topk": 2, "num_groups": 3, "group_topk": 2, "score_function": "sigmoid"},
    "experts_alone": {"topk": 2, "num_groups": 12, "group_topk": 5, "score_function": "sigmoid"},
    "sigmoid": {"topk": 5, "score_function": "sigmoid", "norm_topk_prob": False},
    "softmax": {"topk": 2},
    "qwen": {"topk": 2, "pre_softmax": True},
}


def randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.numel():
        assert (got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max().clamp(min=1e-3)


def assert_same(cuda: TrainOps, run: Callable, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    """Outputs and gradients of float inputs; the reference's are computed in float32 from the same values."""
    found = []
    for ops, of_dtype in ((cuda, dtype), (REFERENCE, torch.float32)):
        leaves = [randn(dtype, *shape, seed=i).to(of_dtype).requires_grad_() for i, shape in enumerate(shapes)]
        out = run(ops, *leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).to(of_dtype))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        assert_close(got.float(), want, TOLERANCE[dtype])
