"""The table of a CPU equals the reference, with gradients, whether or not the CPU multiplies bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.core.ops import TrainOps, reference_ops
from megatron.core.ops.contract import AdamwSettings
from megatron.core.ops.cpu import attention, build, cpu_ops
from megatron.core.ops.cpu.build import run
from megatron.core.ops.cpu.instructions import multiplies_bfloat16
from megatron.core.ops.reference_attention import whole_sequence_attention
from tests.compiler import HAS_COMPILER, needs_compiler
from tests.megatron.model_helpers import shared_prompts

CPU, REFERENCE = cpu_ops(), reference_ops()
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _assert_same(run: Callable, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    found = []
    for ops in (CPU, REFERENCE):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = run(ops, *leaves)
        assert out.dtype == dtype
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (4, 6), (2, 8)])
def test_attention_of_sequences_of_several_lengths(
    dtype: torch.dtype, causal: bool, kv_heads: int, value_size: int
) -> None:
    bounds = torch.tensor([0, 5, 6, 11, 20, 20]).int()  # two of one length, one token alone, none at all

    def run(ops: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.core_attention(q, k, v, bounds, 9, 0.3, causal)

    _assert_same(run, dtype, (20, 4, 8), (20, kv_heads, 8), (20, kv_heads, value_size))


@pytest.fixture(params=["", "torch's kernel too"])
def long_ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 128 tokens and more are left to torch's kernel in bfloat16, or none is."""
    if request.param:
        monkeypatch.setattr(attention, "_LONG", 128)
        monkeypatch.setattr(attention, "_LONG_WITH_TILES", 128)


@pytest.mark.usefixtures("long_ones")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_of_long_and_short_sequences(dtype: torch.dtype, causal: bool, kv_heads: int) -> None:
    """One of several tiles, one of a tile and a row, and short ones that are padded together."""
    lengths = torch.tensor([0, 300, 7, 129, 5, 128, 7, 1, 30])
    bounds = lengths.cumsum(0).int()
    size = int(bounds[-1])

    def run(ops: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.core_attention(q, k, v, bounds, 300, 0.3, causal)

    _assert_same(run, dtype, (size, 4, 8), (size, kv_heads, 8), (size, kv_heads, 6))


@pytest.mark.usefixtures("long_ones")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_of_sequences_that_share_prompts(dtype: torch.dtype, kv_heads: int) -> None:
    """Prompts of 70 (in three sequences, one of which ends there), of 3 (in two) and of 130; and one without."""
    prompts, own = [70, 70, 70, 3, 3, 130, 0], [5, 0, 66, 1, 9, 2, 7]
    bounds, longest, shared = shared_prompts(prompts, own)
    num_computed = len(shared.whole_T)

    def run(ops: TrainOps, *qkv: torch.Tensor) -> torch.Tensor:
        attend = ops.shared_prompt_attention or partial(whole_sequence_attention, ops.core_attention)
        return attend(*qkv, bounds, longest, 0.3, shared)

    _assert_same(run, dtype, (num_computed, 4, 8), (num_computed, kv_heads, 8), (num_computed, kv_heads, 6))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [24, 768])
def test_norm_of_a_part_of_rows(dtype: torch.dtype, width: int) -> None:
    """As the latent norm has it: rows of a wider tensor; and heads, which are rows of a third dimension."""
    _assert_same(lambda ops, x, w: ops.rms_norm(x[:, :width], w, 1e-6), dtype, (70, width + 8), (width,))
    _assert_same(lambda ops, x, w: ops.rms_norm(x.transpose(0, 1), w, 1e-6), dtype, (3, 9, width), (width,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [6, 1024])
def test_swiglu(dtype: torch.dtype, width: int) -> None:
    _assert_same(lambda ops, x: ops.swiglu(x), dtype, (50, width))
    _assert_same(lambda ops, x: ops.swiglu(40 * x), dtype, (50, width))  # sigmoids of almost 0 and 1


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary_of_a_part_of_heads(dtype: torch.dtype) -> None:
    angle = torch.randn(30, 8)
    cos, sin = angle.cos(), angle.sin()
    _assert_same(lambda ops, x: ops.rotary_interleaved(x[..., 8:], cos, sin), dtype, (30, 5, 24))
    _assert_same(lambda ops, x: ops.rotary_interleaved(x, cos, sin), dtype, (30, 1, 16))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [6, 300])
def test_tokens_by_expert_and_back(dtype: torch.dtype, size: int) -> None:
    indices = torch.rand(40, 8, generator=torch.Generator().manual_seed(1)).topk(3).indices
    probs = torch.rand(40, 3, generator=torch.Generator().manual_seed(2))

    def there_and_back(ops: TrainOps, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        permuted, row_map = ops.token_permute(x, indices)
        return ops.token_unpermute(permuted * rows, row_map, probs)

    _assert_same(there_and_back, dtype, (40, size), (120, size))


def test_gradient_of_the_weights_of_experts() -> None:
    indices = torch.tensor([[0, 2], [1, 0], [2, 1]])
    found = []
    for ops in (CPU, REFERENCE):
        probs = torch.tensor([[0.1, 0.9], [0.5, 0.5], [1.0, 0.0]], requires_grad=True)
        rows, row_map = ops.token_permute(torch.arange(12.0).view(3, 4), indices)
        (ops.token_unpermute(rows, row_map, probs) * torch.arange(12.0).view(3, 4)).sum().backward()
        found.append(probs.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_grouped_matmul(dtype: torch.dtype) -> None:
    counts = torch.tensor([3, 0, 5])
    _assert_same(lambda ops, x, w: ops.grouped_matmul(x, w, counts), dtype, (8, 6), (3, 6, 4))


@pytest.mark.parametrize("sums_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_weight_gradients_of_experts_are_added_up(dtype: torch.dtype, sums_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((8, 6), (3, 6, 4), (8, 4)))
    before = torch.randn(3, 6, 4, generator=generator).to(sums_dtype)
    w.requires_grad_()
    w.main_grad, w.grad_added_to_main_grad = before.clone(), False  # type: ignore[attr-defined]
    CPU.grouped_matmul(x, w, torch.tensor([3, 0, 5])).backward(grad)
    assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
    want = before.double()
    for expert, rows in ((0, slice(3)), (2, slice(3, 8))):
        want[expert] += x[rows].double().t() @ grad[rows].double()
    got = w.main_grad.double()  # type: ignore[attr-defined]
    assert (got - want).abs().max() <= max(TOLERANCE[dtype], TOLERANCE[sums_dtype]) * want.abs().max()
    assert torch.equal(got[1], before[1].double())


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 7), (3, 70_001)])
def test_sums_over_logits(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Rows of a wider tensor; logits far from one another, a masked one, and a target that another rank has."""
    generator = torch.Generator().manual_seed(0)
    wide = (10 * torch.randn(shape[0], shape[1] + 3, generator=generator)).to(dtype)
    logits = wide[:, : shape[1]]
    logits[0] += 300
    target = torch.randint(shape[1], shape[:1], generator=generator)
    target[1], target[2] = -1, 0
    grad = torch.randn(shape[0], generator=generator)
    lse, mean = CPU.log_sum_exp(logits, with_mean=True)
    want_lse, want_mean = REFERENCE.log_sum_exp(logits.double(), with_mean=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mean.double(), want_mean, rtol=1e-6, atol=1e-5)
    assert CPU.log_sum_exp(logits)[1] is None
    logits[2, 3] = -torch.inf
    lse, _ = CPU.log_sum_exp(logits)
    torch.testing.assert_close(lse, REFERENCE.log_sum_exp(logits)[0])
    got = CPU.cross_entropy_grad(logits, lse, target, grad)
    want = REFERENCE.cross_entropy_grad(logits, lse, target, grad)
    assert got.dtype == dtype and got[2, 3] == 0
    assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype] * want.float().abs().max()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_sums_over_logits_that_are_not_finite(value: float) -> None:
    logits = torch.randn(3, 40)
    logits[1, 5] = value
    (lse, _), (want, _) = CPU.log_sum_exp(logits), REFERENCE.log_sum_exp(logits)
    torch.testing.assert_close(lse, want, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_matmul_takes_transposed_operands(dtype: torch.dtype) -> None:
    a, b = (torch.randn(7, 5).to(dtype) for _ in range(2))
    want = (a.double().t() @ b.double()).to(dtype)
    got = CPU.matmul(a.t(), b)
    assert got.dtype == dtype
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


def test_without_a_compiler_the_table_says_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    ops = cpu_ops()
    names = ("core_attention", "rms_norm", "swiglu", "rotary_interleaved", "token_permute", "token_unpermute")
    for name in (*names, "log_sum_exp", "cross_entropy_grad"):
        assert ops.names[name] == "reference" and getattr(ops, name) is getattr(REFERENCE, name)
    assert ops.names["matmul"] == "native" and (CPU.names["rms_norm"] == "native") == HAS_COMPILER


def test_with_a_broken_compiler_the_table_and_a_warning_say_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_kernels", build._kernels.__wrapped__)  # as in a process that has none yet
    for _ in range(2):
        ops = cpu_ops()
    assert ops.names["rms_norm"] == "reference" and ops.rms_norm is REFERENCE.rms_norm
    assert "several times slower" in caplog.messages[0] and "too old" in caplog.messages[0]
    with pytest.raises(RuntimeError, match="too old"):
        run("rms_norm", torch.float32)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments_dtype", TOLERANCE)
@pytest.mark.parametrize("grad_dtype", TOLERANCE)
def test_adamw_in_one_pass(
    grad_dtype: torch.dtype, moments_dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Three steps, as the state is stored, of more elements than a thread takes at once."""
    generator = torch.Generator().manual_seed(0)
    size = 70_001
    param, mean, square = torch.randn(size, generator=generator), *torch.rand(2, size, generator=generator)
    grads = torch.randn(3, size, generator=generator).to(grad_dtype)
    found = []
    for ops in (CPU, REFERENCE):
        state = [param.clone(), mean.to(moments_dtype, copy=True), square.to(moments_dtype, copy=True)]
        weight = [] if weight_dtype is None else [torch.zeros(size, dtype=weight_dtype)]
        for step, grad in enumerate(grads, start=1):
            how = AdamwSettings(step, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1, grad_scale=0.25)
            ops.adamw_step(state[0], grad.clone(), *state[1:], how, *weight)
        assert all(torch.equal(copy, state[0].to(copy.dtype)) for copy in weight)
        found.append(state)
    for got, want in zip(*found, strict=True):
        tolerance = 1e-6 if moments_dtype == torch.float32 else TOLERANCE[torch.bfloat16]
        assert (got.float() - want.float()).abs().max() <= tolerance * want.float().abs().max()


@pytest.mark.parametrize("longest", ["rows", "inner", "columns"])
def test_large_products_are_made_in_parts(monkeypatch: pytest.MonkeyPatch, longest: str) -> None:
    monkeypatch.setattr("megatron.core.ops.cpu.table._WIDE_ELEMENTS", 1000)
    monkeypatch.setattr("megatron.core.ops.cpu.table._MIN_WIDE", 16)
    sizes = {"rows": 40, "inner": 30, "columns": 20} | {longest: 75}
    a, b = (
        torch.randn(sizes["rows"], sizes["inner"]).bfloat16(),
        torch.randn(sizes["columns"], sizes["inner"]).bfloat16(),
    )
    got, want = CPU.matmul(a, b.t()), a.double() @ b.double().t()
    assert (got.double() - want).abs().max() <= TOLERANCE[torch.bfloat16] * want.abs().max()


def test_products_without_bfloat16_instructions_are_rounded_once() -> None:
    if multiplies_bfloat16():
        pytest.skip("this CPU multiplies bfloat16 itself")
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    assert torch.equal(CPU.matmul(a, b), (a.float() @ b.float()).bfloat16())
