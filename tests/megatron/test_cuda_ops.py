"""The table of CUDA equals the reference, with gradients: library ops in their CPU form, Triton's kernels interpreted.

Torch's two flash-attention ops have no CPU form: tests/megatron/flash_attention_form.py stands in for them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.context_parallel.block import merge
from megatron.core.ops import TrainOps, reference_ops, resolve
from megatron.core.ops.cuda import attention, cuda_ops
from megatron.core.ops.cuda.table import ONLY_ON_GPU
from tests.megatron.flash_attention_form import flash_attention_on_cpu

pytestmark = [
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


@pytest.fixture(scope="module")
def cuda() -> TrainOps:
    return cuda_ops()


@pytest.fixture
def flash_calls() -> Iterator[list[tuple[str, int, int]]]:
    with flash_attention_on_cpu() as calls:
        yield calls


def _randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    if want.numel():
        assert (got.double() - want.double()).abs().max() <= tolerance * want.double().abs().max().clamp(min=1e-3)


def _assert_same(cuda: TrainOps, run: Callable, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
    """Outputs and gradients of float inputs; the reference's are computed in float32 from the same values."""
    found = []
    for ops, of_dtype in ((cuda, dtype), (REFERENCE, torch.float32)):
        leaves = [_randn(dtype, *shape, seed=i).to(of_dtype).requires_grad_() for i, shape in enumerate(shapes)]
        out = run(ops, *leaves)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).to(of_dtype))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        _assert_close(got.float(), want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [24, 192])
def test_norm_of_a_part_of_rows(cuda: TrainOps, dtype: torch.dtype, width: int) -> None:
    """As the latent norm has it: rows of a wider tensor; and heads, which are rows of a third dimension."""
    _assert_same(cuda, lambda ops, x, w: ops.rms_norm(x[:, :width], w, 1e-6), dtype, (7, width + 8), (width,))
    _assert_same(cuda, lambda ops, x, w: ops.rms_norm(x.transpose(0, 1), w, 1e-6), dtype, (2, 3, width), (width,))


def test_norm_of_more_rows_than_programs(cuda: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.ops.cuda.rows.MAX_PROGRAMS", 4)
    _assert_same(cuda, lambda ops, x, w: ops.rms_norm(x, w, 1e-6), torch.float32, (9, 6), (6,))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [6, 2100])
def test_swiglu(cuda: TrainOps, dtype: torch.dtype, width: int) -> None:
    _assert_same(cuda, lambda ops, x: ops.swiglu(x), dtype, (5, width))
    _assert_same(cuda, lambda ops, x: ops.swiglu(40 * x), dtype, (5, width))  # sigmoids of almost 0 and 1


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [8, 12])
def test_rotary_of_a_part_of_heads(cuda: TrainOps, dtype: torch.dtype, size: int) -> None:
    angle = _randn(torch.float32, 6, size // 2)
    cos, sin = angle.cos(), angle.sin()
    _assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x[..., 8:], cos, sin), dtype, (6, 5, size + 8))
    _assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x, cos, sin), dtype, (6, 1, size))


def test_rotary_of_more_heads_than_a_program_takes(cuda: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.ops.cuda.rows._HEADS_SIZE", 16)
    angle = _randn(torch.float32, 3, 4)
    _assert_same(cuda, lambda ops, x: ops.rotary_interleaved(x, angle.cos(), angle.sin()), torch.float32, (3, 5, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (4, 6), (2, 12), (1, 5)])
def test_attention_of_packed_sequences(
    cuda: TrainOps, flash_calls: list, dtype: torch.dtype, causal: bool, kv_heads: int, value_size: int
) -> None:
    bounds = torch.tensor([0, 5, 6, 11, 20, 20]).int()  # two of one length, one token alone, none at all

    def run(ops: TrainOps, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.core_attention(q, k, v, bounds, 9, 0.3, causal)

    _assert_same(cuda, run, dtype, (20, 4, 8), (20, kv_heads, 8), (20, kv_heads, value_size))
    in_half = dtype == torch.bfloat16  # float32 goes to the reference, as the table says
    assert flash_calls == [("forward", 9, 9), ("backward", 9, 9)] * in_half


def test_attention_reads_parts_of_wider_tensors(cuda: TrainOps, flash_calls: list) -> None:
    """Keys and values of one projection, at any offset, as the kernel does not take them."""
    bounds = torch.tensor([0, 3, 7]).int()

    def run(ops: TrainOps, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        k, v = kv.split([16, 13], dim=-1)
        return ops.core_attention(q[..., 1:], k, v, bounds, 4, 0.3)

    _assert_same(cuda, run, torch.bfloat16, (7, 4, 17), (7, 2, 29))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_heads", "value_size"), [(4, 8), (2, 3)])
def test_attention_blocks_and_their_gradients(
    cuda: TrainOps, flash_calls: list, dtype: torch.dtype, causal: bool, kv_heads: int, value_size: int
) -> None:
    """Queries are the last ones of their sequence; out and lse of the gradient are those of all keys together."""
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([2, 1, 3], [4, 1, 5])]
    q, k = _randn(dtype, 6, 4, 8), _randn(dtype, 10, kv_heads, 8, seed=1)
    v, grad = _randn(dtype, 10, kv_heads, value_size, seed=2), _randn(dtype, 6, 4, value_size, seed=3)
    got, want = (ops.attention_block(q, k, v, *bounds, 0.3, causal) for ops in (cuda, REFERENCE))
    assert got[1].is_contiguous()
    _assert_close(got[0], want[0], TOLERANCE[dtype])
    _assert_close(got[1], want[1], 1e-5)
    lse = want[1] + 0.25  # as if other keys had a share
    got, want = (
        ops.attention_block_grad(grad, q, k, v, want[0], lse, *bounds, 0.3, causal) for ops in (cuda, REFERENCE)
    )
    for grad_got, grad_want in zip(got, want, strict=True):
        _assert_close(grad_got, grad_want, TOLERANCE[dtype])
    if dtype == torch.bfloat16:
        assert flash_calls == [("forward", 6, 10), ("backward", 6, 10)]  # of bounds on the device nothing is read


def test_blocks_of_keys_join_to_the_whole(cuda: TrainOps, flash_calls: list) -> None:
    """As context parallelism has it: the last three queries' own keys, and four keys before them."""
    q, k, v = (_randn(torch.bfloat16, 3 if size == 9 else 7, 4, size) for size in (9, 8, 6))
    q = q[..., 1:]
    grad, bounds = _randn(torch.bfloat16, 3, 4, 6, seed=3), {n: torch.tensor([0, n]).int() for n in (3, 4, 7)}
    out, lse = cuda.attention_block(q, k[4:], v[4:], bounds[3], bounds[3], 0.3)
    out = out.float()
    merge(out, lse, *cuda.attention_block(q, k[:4], v[:4], bounds[3], bounds[4], 0.3, False))
    want, want_lse = REFERENCE.attention_block(q, k, v, bounds[3], bounds[7], 0.3)
    _assert_close(out, want.float(), TOLERANCE[torch.bfloat16])
    _assert_close(lse, want_lse, 1e-5)
    own = cuda.attention_block_grad(grad, q, k[4:], v[4:], out, lse, bounds[3], bounds[3], 0.3)
    earlier = cuda.attention_block_grad(grad, q, k[:4], v[:4], out, lse, bounds[3], bounds[4], 0.3, False)
    found = own[0].float() + earlier[0].float(), *(torch.cat(pair) for pair in zip(earlier[1:], own[1:], strict=True))
    wanted = REFERENCE.attention_block_grad(grad, q, k, v, want, want_lse, bounds[3], bounds[7], 0.3)
    for grad_found, grad_wanted in zip(found, wanted, strict=True):
        _assert_close(grad_found.float(), grad_wanted.float(), 2 * TOLERANCE[torch.bfloat16])


def test_bounds_on_the_host_give_the_longest_sequences() -> None:
    """On a device of another kind, where the host's bounds travel and nothing comes back."""
    q = torch.empty(6, 4, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(10, 4, 8, device="meta", dtype=torch.bfloat16)
    bounds = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([2, 1, 3], [4, 1, 5])]
    sequences = attention._sequences(q, k, *bounds)
    assert (sequences.longest_q, sequences.longest_k) == (3, 5)
    assert sequences.bounds_q.device == sequences.bounds_k.device == q.device
    out, lse = attention.FlashAttention().block(q, k, k, *bounds, 0.3)
    assert out.shape == q.shape and lse.shape == (6, 4) and lse.dtype == torch.float32


def test_heads_that_flash_attention_does_not_take_are_refused(cuda: TrainOps) -> None:
    q = torch.zeros(2, 1, 264, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="heads of 264 on CUDA: flash attention takes up to 256"):
        cuda.core_attention(q, q, q, torch.tensor([0, 2]).int(), 2, 0.3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("counts", [[3, 0, 5, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
def test_grouped_matmul(cuda: TrainOps, dtype: torch.dtype, counts: list[int]) -> None:
    """Experts without rows have a zero gradient."""
    rows = sum(counts)
    run = lambda ops, x, w: ops.grouped_matmul(x, w, torch.tensor(counts))  # noqa: E731
    _assert_same(cuda, run, dtype, (rows, 8), (4, 8, 16))


@pytest.mark.parametrize("sums_dtype", TOLERANCE)
def test_weight_gradients_of_experts_are_added_up(cuda: TrainOps, sums_dtype: torch.dtype) -> None:
    x, w, grad = (_randn(torch.bfloat16, *shape) for shape in ((8, 8), (3, 8, 16), (8, 16)))
    before = _randn(sums_dtype, 3, 8, 16, seed=1)
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
    w = _randn(torch.bfloat16, 3, 8, 8).requires_grad_()
    cuda.grouped_matmul(_randn(torch.bfloat16, 5, 8), w, torch.tensor([0, 5, 0])).sum().backward()
    assert w.grad is not None and not w.grad[0].any() and not w.grad[2].any() and w.grad[1].isfinite().all()


def test_widths_that_grouped_mm_does_not_take_are_refused(cuda: TrainOps) -> None:
    x, w = _randn(torch.bfloat16, 2, 8), _randn(torch.bfloat16, 1, 8, 12)
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

    _assert_same(cuda, there_and_back, dtype, (tokens, size), (tokens * topk, size), (tokens, topk))
    _assert_same(cuda, without_weights, dtype, (tokens, size))


ROUTERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk": 4, "num_groups": 4, "group_topk": 2, "score_function": "sigmoid", "scaling_factor": 2.5},
    "deepseek_v2": {"topk": 3, "num_groups": 4, "group_topk": 2, "pre_softmax": True},
    "odd": {"topk": 2, "num_groups": 3, "group_topk": 2, "score_function": "sigmoid"},
    "experts_alone": {"topk": 2, "num_groups": 12, "group_topk": 5, "score_function": "sigmoid"},
    "sigmoid": {"topk": 5, "score_function": "sigmoid", "norm_topk_prob": False},
    "softmax": {"topk": 2},
    "qwen": {"topk": 2, "pre_softmax": True},
}


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("how", ROUTERS.values(), ids=ROUTERS)
def test_router(cuda: TrainOps, how: dict[str, Any], has_bias: bool) -> None:
    """The same experts in any order, their weights, and the gradient of the logits."""
    experts = 12
    bias = 2 * _randn(torch.float32, experts, seed=1) if has_bias else None  # biased scores may be negative
    found = []
    for ops in (cuda, REFERENCE):
        logits = _randn(torch.float32, 7, experts).requires_grad_()
        probs, indices = ops.topk_router(logits, expert_bias=bias, **how)
        assert indices.dtype == torch.int64
        by_expert = torch.zeros(7, experts).scatter(1, indices, probs)
        by_expert.backward(_randn(torch.float32, 7, experts, seed=2))
        found.append((by_expert.detach(), logits.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_router_takes_replayed_experts_and_no_tokens(cuda: TrainOps) -> None:
    chosen = torch.tensor([[5, 0], [1, 2]])
    probs, indices = cuda.topk_router(_randn(torch.float32, 2, 6), topk=2, chosen_TK=chosen)
    assert indices is chosen and probs.shape == (2, 2)
    assert cuda.topk_router(torch.zeros(0, 6), topk=2)[1].shape == (0, 2)


def test_logits_that_are_no_numbers_choose_experts_that_exist(cuda: TrainOps) -> None:
    """The loss is then no number either, which is reported; an index out of range would stop the device."""
    for how in ROUTERS.values():
        _, indices = cuda.topk_router(torch.full((2, 12), torch.nan), **how)
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
    _assert_close(got.float(), want, max(TOLERANCE[dtype], 1e-5))


class _NoWideLogits(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            assert not isinstance(x, torch.Tensor) or x.dim() < 2 or x.dtype == torch.bfloat16, "a wide copy of logits"
        return out


def test_no_float32_copy_of_logits_is_made(cuda: TrainOps) -> None:
    logits, targets = _randn(torch.bfloat16, 3, 50), torch.zeros(3, dtype=torch.int64)
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
    a, b = _randn(dtype, 7, 5), _randn(dtype, 7, 5, seed=1)
    _assert_close(cuda.matmul(a.t(), b), (a.double().t() @ b.double()).to(dtype), TOLERANCE[dtype])
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("moments_dtype", TOLERANCE)
def test_adamw(cuda: TrainOps, moments_dtype: torch.dtype) -> None:
    how = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.25}
    found = []
    for ops in (cuda, REFERENCE):
        state = [_randn(torch.float32, 50), *(x.to(moments_dtype) for x in _randn(torch.float32, 2, 50).square())]
        weight = torch.zeros(50, dtype=torch.bfloat16)
        for step in (1, 2, 3):
            ops.adamw_step(state[0], _randn(torch.bfloat16, 50, seed=step), *state[1:], weight, step=step, **how)
        assert torch.equal(weight, state[0].bfloat16())
        found.append(state)
    for got, want in zip(*found, strict=True):
        _assert_close(got, want, TOLERANCE[moments_dtype])


def test_the_table_says_what_runs(cuda: TrainOps) -> None:
    ops = resolve("megatron.core.ops.cuda:cuda_ops")
    assert set(ops.names) == set(REFERENCE.names) and all("native" in name for name in ops.names.values())
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


WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "unique", "masked_select", "equal", "is_nonzero")
CASTS = ("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__")
READ_BACK = ("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "_unique2", "equal", "is_nonzero")


class _Watch:
    """Whether what runs belongs to the ops: Triton's interpreter reads everything on the host."""

    is_paused = False


class _NoHostFunctions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        assert _Watch.is_paused or name not in WAITS + CASTS, f"the host waits for the device in {name}"
        return function(*args, **(kwargs or {}))


class _NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        lengths_only = name == "repeat_interleave" and function._overloadname == "Tensor"
        if not _Watch.is_paused:
            assert name not in READ_BACK, f"the host waits for the device in {name}"
            assert not lengths_only or (kwargs or {}).get("output_size") is not None, "the size of the result is read"
            assert not (name.startswith("index") and _has_mask(args)), f"{name} by a mask: the size is read"
        return function(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(x is not None and x.dtype == torch.bool for x in indices)


@pytest.fixture
def no_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def unwatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Watch.is_paused = True
        try:
            return run(self, *args, **kwargs)
        finally:
            _Watch.is_paused = False

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unwatched)
    with _NoHostFunctions(), _NoReadBack():
        yield


def test_the_watch_sees_the_host_wait(no_host: None) -> None:
    x = torch.tensor([2, 1])
    for waits in (
        lambda: x.sum().item(),
        x.tolist,
        x.cpu,
        lambda: bool(x[0] > 1),
        lambda: x[x > 1],
        x.nonzero,
        lambda: x.repeat_interleave(x),
        lambda: REFERENCE.grouped_matmul(torch.ones(3, 1), torch.ones(2, 1, 1), x),
    ):
        with pytest.raises(AssertionError, match="waits|is read"):
            waits()


def test_no_op_makes_the_host_wait(cuda: TrainOps, flash_calls: list, no_host: None) -> None:
    """Forward and backward in bfloat16, with counts and bounds on the device (here: where the tokens are)."""
    bf16, fp32 = torch.bfloat16, torch.float32
    covered = set()

    def run(name: str, *args: Any, **named: Any) -> Any:
        covered.add(name)
        result = getattr(cuda, name)(*args, **named)
        outs = result if isinstance(result, tuple) else (result,)
        for out in outs:
            if out is not None and out.requires_grad:
                out.backward(torch.ones_like(out))
        return result

    x, weight = _randn(bf16, 4, 8).requires_grad_(), _randn(bf16, 8, seed=1).requires_grad_()
    run("rms_norm", x, weight, 1e-6)
    run("swiglu", x)
    run("rotary_interleaved", _randn(bf16, 4, 2, 8).requires_grad_(), *_randn(fp32, 2, 4, 4))
    run("matmul", x.detach(), x.detach().t())
    q, k, v = (_randn(bf16, 4, heads, size).requires_grad_() for heads, size in ((4, 8), (2, 8), (2, 6)))
    bounds = torch.tensor([0, 1, 4]).int()
    run("core_attention", q, k, v, bounds, 3, 0.3)
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    out, lse = run("attention_block", q, k, v, bounds, bounds, 0.3)
    run("attention_block_grad", out, q, k, v, out, lse, bounds, bounds, 0.3)
    w = _randn(bf16, 3, 8, 8).requires_grad_()
    run("grouped_matmul", x, w, torch.tensor([1, 0, 3]))
    w.main_grad = torch.zeros(3, 8, 8)  # type: ignore[attr-defined]
    run("grouped_matmul", x, w, torch.tensor([1, 0, 3]))
    logits = _randn(fp32, 4, 8).requires_grad_()
    probs, indices = run("topk_router", logits, expert_bias=_randn(fp32, 8), **ROUTERS["deepseek_v3"])
    rows, row_map = run("token_permute", x, indices)
    run("token_unpermute", rows.detach().requires_grad_(), row_map, probs.detach().requires_grad_())
    run("token_unpermute", rows.detach().requires_grad_(), row_map, topk=4)
    lse_T, _ = run("log_sum_exp", x.detach(), with_mean=True)
    run("cross_entropy_grad", x.detach(), lse_T, torch.zeros(4, dtype=torch.int64), torch.ones(4))
    state = _randn(fp32, 3, 10).abs().unbind()
    how = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.5}
    run("adamw_step", state[0], torch.ones(10), *state[1:], torch.zeros(10, dtype=bf16), step=1, **how)
    assert covered == set(cuda.names)


def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Down to the machine code of an H100, which needs no GPU: the interpreter takes more than the compiler does."""
    script = Path(__file__).parent / "compile_cuda_kernels.py"
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    from megatron.core.ops.cuda.kernels import experts, rows, vocab

    ours = {
        name
        for module in (experts, rows, vocab)
        for name, value in vars(module).items()
        if type(value).__name__ == "InterpretedFunction"
    }
    assert set(done.stdout.split()) == ours and len(ours) > 10
