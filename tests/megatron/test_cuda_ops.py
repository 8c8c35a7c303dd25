"""The table of CUDA equals the reference, with gradients: library ops in their CPU form, Triton's kernels interpreted.

Torch's two flash-attention ops have no CPU form: tests/megatron/flash_attention_form.py stands in for them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.ops import TrainOps, resolve
from megatron.core.ops.contract import AdamwSettings, RouterRule
from megatron.core.ops.cuda import cuda_ops
from megatron.core.ops.cuda.table import ONLY_ON_GPU
from tests.megatron.cuda_op_helpers import MARKS, REFERENCE, ROUTERS, TOLERANCE, assert_close, assert_same, randn

pytestmark = MARKS


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [24, 192])
def test_norm_of_a_part_of_rows(cuda: TrainOps, dtype: torch.dtype, width: int) -> None:
    """As the latent norm has it: rows of a wider tensor; and heads, which are rows of a third dimension."""
    assert_same(cuda, lambda ops, x, w: ops.rms_norm(x[:, :width], w, 1e-6), dtype, (7, width + 8), (width,))
    assert_same(cuda, lambda ops, x, w: ops.rms_norm(x.transpose(0, 1), w, 1e-6), dtype, (2, 3, width), (width,))


def test_norm_of_more_rows_than_programs(cuda: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.ops.cuda.rows.MAX_PROGRAMS", 4)
    assert_same(cuda, lambda ops, x, w: ops.rms_norm(x, w, 1e-6), torch.float32, (9, 6), (6,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [6, 2100])
def test_swiglu(cuda: TrainOps, dtype: torch.dtype, width: int) -> None:
    assert_same(cuda, lambda ops, x: ops.swiglu(x), dtype, (5, width))
    assert_same(cuda, lambda ops, x: ops.swiglu(40 * x), dtype, (5, width))  # sigmoids of almost 0 and 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [8, 12])
def test_rotary_of_a_part_of_heads(cuda: TrainOps, dtype: torch.dtype, size: int) -> None:
    angle = randn(torch.float32, 6, size // 2)
    cos, sin = angle.cos(), angle.sin()
    assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x[..., 8:], cos, sin), dtype, (6, 5, size + 8))
    assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x, cos, sin), dtype, (6, 1, size))


def test_rotary_of_more_heads_than_a_program_takes(cuda: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.ops.cuda.rows._HEADS_SIZE", 16)
    angle = randn(torch.float32, 3, 4)
    assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x, angle.cos(), angle.sin()), torch.float32, (3, 5, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_grouped_matmul(cuda: TrainOps, dtype: torch.dtype, counts: list[int]) -> None:
    """Experts without rows have a zero gradient."""
    rows = sum(counts)
    run = lambda ops, x, w: ops.grouped_matmul(x, w, torch.tensor(counts))  # noqa: E731
    assert_same(cuda, run, dtype, (rows, 8), (4, 8, 16))


@pytest.mark.parametrize("sums_dtype", TOLERANCE)
def test_weight_gradients_of_experts_are_added_up(cuda: TrainOps, sums_dtype: torch.dtype) -> None:
    x, w, grad = (randn(torch.bfloat16, *shape) for shape in ((8, 8), (3, 8, 16), (8, 16)))
    before = randn(sums_dtype, 3, 8, 16, seed=1)
    w.requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = before.clone(), False  # type: ignore[attr-defined]
    cuda.grouped_matmul(x, w, torch.tensor([3, 0, 5])).backward(grad)
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    want = before.double()
    for expert, rows in ((0, slice(3)), (2, slice(3, 8))):
        want[expert] += x[rows].double().t() @ grad[rows].double()
    got = w.main_grad.double()  # type: ignore[attr-defined]
    assert (got - want).abs().max() <= TOLERANCE[torch.bfloat16] * want.abs().max()
    assert torch.equal(got[1], before[1].double())


def test_what_grouped_mm_leaves_in_idle_experts_becomes_zero(cuda: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says that a GPU's kernel writes there."""
    from megatron.core.ops.cuda import experts

    product = torch.nn.functional.grouped_mm

    def leaves_garbage(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = product(a, b, offs=offs)
        return (
            out.masked_fill((offs.diff(prepend=offs[:1] * 0) == 0).view(-1, 1, 1), torch.nan) if out.dim() == 3 else out
        )

    monkeypatch.setattr(experts.F, "grouped_mm", leaves_garbage)
    w = randn(torch.bfloat16, 3, 8, 8).requires_grad_()
    cuda.grouped_matmul(randn(torch.bfloat16, 5, 8), w, torch.tensor([0, 5, 0])).sum().backward()
    assert w.grad is not None and not w.grad[0].any() and not w.grad[2].any() and w.grad[1].isfinite().all()


def test_widths_that_grouped_mm_does_not_take_are_refused(cuda: TrainOps) -> None:
    x, w = randn(torch.bfloat16, 2, 8), randn(torch.bfloat16, 1, 8, 12)
    with pytest.raises(ValueError, match="experts of 8 x 12 on CUDA: .* multiples of 8"):
        cuda.grouped_matmul(x, w, torch.tensor([2]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "topk", "size"), [(9, 3, 6), (4, 1, 1030), (1, 2, 8), (0, 2, 8)])
def test_tokens_by_expert_and_back(cuda: TrainOps, dtype: torch.dtype, tokens: int, topk: int, size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    indices = torch.rand(tokens, 8, generator=generator).topk(topk).indices

    def there_and_back(ops: TrainOps, x: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        permuted, row_map = ops.token_permute(x, indices)
        return ops.token_unpermute(permuted * rows, row_map, probs.float())

    def without_weights(ops: TrainOps, x: torch.Tensor) -> torch.Tensor:
        permuted, row_map = ops.token_permute(x, indices)
        return ops.token_unpermute(permuted, row_map, topk=topk)

    assert_same(cuda, there_and_back, dtype, (tokens, size), (tokens * topk, size), (tokens, topk))
    assert_same(cuda, without_weights, dtype, (tokens, size))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("how", ROUTERS.values(), ids=ROUTERS)
def test_router(cuda: TrainOps, how: dict[str, Any], has_bias: bool) -> None:
    """The same experts in any order, their weights, and the gradient of the logits."""
    experts = 12
    bias = 2 * randn(torch.float32, experts, seed=1) if has_bias else None  # biased scores may be negative
    found = []
    for ops in (cuda, REFERENCE):
        logits = randn(torch.float32, 7, experts).requires_grad_()
        probs, indices = ops.topk_router(logits, RouterRule(**how), bias)
        assert indices.dtype == torch.int64
        by_expert = torch.zeros(7, experts).scatter(1, indices, probs)
        by_expert.backward(randn(torch.float32, 7, experts, seed=2))
        found.append((by_expert.detach(), logits.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_router_takes_replayed_experts_and_no_tokens(cuda: TrainOps) -> None:
    chosen = torch.tensor([[5, 0], [1, 2]])
    probs, indices = cuda.topk_router(randn(torch.float32, 2, 6), RouterRule(topk=2), chosen_TK=chosen)
    assert indices is chosen and probs.shape == (2, 2)
    assert cuda.topk_router(torch.zeros(0, 6), RouterRule(topk=2))[1].shape == (0, 2)


def test_logits_that_are_no_numbers_choose_experts_that_exist(cuda: TrainOps) -> None:
    """The loss is then no number either, which is reported; an index out of range would stop the device."""
    for how in ROUTERS.values():
        _, indices = cuda.topk_router(torch.full((2, 12), torch.nan), RouterRule(**how))
        assert indices.min() >= 0 and indices.max() < 12


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 7), (3, 9_001)])
def test_sums_over_logits(cuda: TrainOps, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Rows of a wider tensor, of several blocks; logits far from one another, a masked one, another rank's target."""
    generator = torch.Generator().manual_seed(0)
    wide = (10 * torch.randn(shape[0], shape[1] + 3, generator=generator)).to(dtype)
    logits = wide[:, : shape[1]]
    logits[0] += 300
    target = torch.randint(shape[1], shape[:1], generator=generator)
    target[1], target[2] = -1, 0
    grad = torch.randn(shape[0], generator=generator)
    lse, mean = cuda.log_sum_exp(logits, with_mean=True)
    want_lse, want_mean = REFERENCE.log_sum_exp(logits.double(), with_mean=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-6, atol=1e-5)
    assert cuda.log_sum_exp(logits)[1] is None
    logits[2, 3] = -torch.inf
    lse, mean = cuda.log_sum_exp(logits, with_mean=True)
    assert mean.isfinite().all()
    torch.testing.assert_close(lse, REFERENCE.log_sum_exp(logits)[0])
    got = cuda.cross_entropy_grad(logits, lse, target, grad)
    assert got.dtype == dtype and got[2, 3] == 0
    want = REFERENCE.cross_entropy_grad(logits.float(), lse, target, grad)
    assert_close(got.float(), want, max(TOLERANCE[dtype], 1e-5))


class _NoWideLogits(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            assert not isinstance(x, torch.Tensor) or x.dim() < 2 or x.dtype == torch.bfloat16, "a wide copy of logits"
        return out


def test_no_float32_copy_of_logits_is_made(cuda: TrainOps) -> None:
    logits, targets = randn(torch.bfloat16, 3, 50), torch.zeros(3, dtype=torch.int64)
    with _NoWideLogits():
        lse, _ = cuda.log_sum_exp(logits, with_mean=True)
        cuda.cross_entropy_grad(logits, lse, targets, torch.ones(3))
        with pytest.raises(AssertionError, match="a wide copy"):
            REFERENCE.log_sum_exp(logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_sums_over_logits_that_are_not_finite(cuda: TrainOps, value: float) -> None:
    logits = torch.randn(3, 40)
    logits[1, 5] = value
    logits[2] = value
    (lse, _), (want, _) = cuda.log_sum_exp(logits), REFERENCE.log_sum_exp(logits)
    torch.testing.assert_close(lse, want, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_matmul_takes_transposed_operands(cuda: TrainOps, dtype: torch.dtype) -> None:
    a, b = randn(dtype, 7, 5), randn(dtype, 7, 5, seed=1)
    assert_close(cuda.matmul(a.t(), b), (a.double().t() @ b.double()).to(dtype), TOLERANCE[dtype])
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("moments_dtype", TOLERANCE)
def test_adamw(cuda: TrainOps, moments_dtype: torch.dtype) -> None:
    found = []
    for ops in (cuda, REFERENCE):
        state = [randn(torch.float32, 50), *(x.to(moments_dtype) for x in randn(torch.float32, 2, 50).square())]
        weight = torch.zeros(50, dtype=torch.bfloat16)
        for step in (1, 2, 3):
            how = AdamwSettings(step, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1, grad_scale=0.25)
            ops.adamw_step(state[0], randn(torch.bfloat16, 50, seed=step), *state[1:], how, weight)
        assert torch.equal(weight, state[0].bfloat16())
        found.append(state)
    for got, want in zip(*found, strict=True):
        assert_close(got, want, TOLERANCE[moments_dtype])


def test_the_table_says_what_runs(cuda: TrainOps) -> None:
    ops = resolve("megatron.core.ops.cuda:cuda_ops")
    assert set(ops.names) == {*REFERENCE.names, "shared_prompt_attention"} and all(
        "native" in name for name in ops.names.values()
    )
    assert ops.names["core_attention"] == "native (aten flash attention) in half precision, else reference"
    for op in ONLY_ON_GPU:  # those that tests give a form of their own
        namespace, name = op.split("::")
        assert hasattr(getattr(torch.ops, namespace), name)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CPU")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="CUDA train ops need triton"):
            cuda_ops()
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(ValueError, match="needs? torch.nn.functional.grouped_mm"):
        cuda_ops()


@pytest.mark.parametrize("forms", [[], pytest.param(["every"], marks=pytest.mark.slow)])
def test_the_kernels_compile_for_gpus(forms: list[str], tmp_path: Path) -> None:
    """Down to the machine code of an H100, which needs no GPU: the interpreter takes more than the compiler does."""
    script = Path(__file__).parent / "compile_cuda_kernels.py"
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script, *forms], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    from megatron.core.ops.cuda.kernels import experts, fp8, rows, vocab

    ours = {
        name
        for module in (experts, fp8, rows, vocab)
        for name, value in vars(module).items()
        if type(value).__name__ == "InterpretedFunction" and not name.startswith("_")
    }
    assert set(done.stdout.split()) == ours and len(ours) > 10
