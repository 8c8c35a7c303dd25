"""No op of the CUDA table makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.ops import TrainOps
from megatron.core.ops.contract import AdamwSettings, RouterRule
from megatron.core.ops.cuda import attention, cuda_ops
from megatron.core.tensor_parallel.layers import linear, products_of
from tests.megatron.cuda_op_helpers import MARKS, REFERENCE, ROUTERS, randn
from tests.megatron.model_helpers import shared_prompts

pytestmark = MARKS

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


def test_no_op_makes_the_host_wait(
    cuda: TrainOps, flash_calls: list, no_host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    x, weight = randn(bf16, 4, 8).requires_grad_(), randn(bf16, 8, seed=1).requires_grad_()
    run("rms_norm", x, weight, 1e-6)
    run("swiglu", x)
    run("rotary_interleaved", randn(bf16, 4, 2, 8).requires_grad_(), *randn(fp32, 2, 4, 4))
    run("matmul", x.detach(), x.detach().t())
    q, k, v = (randn(bf16, 4, heads, size).requires_grad_() for heads, size in ((4, 8), (2, 8), (2, 6)))
    bounds = torch.tensor([0, 1, 4]).int()
    run("core_attention", q, k, v, bounds, 3, 0.3)
    _Watch.is_paused = True  # spans are on the host
    whole, longest, shared = shared_prompts([1, 1], [2, 1])
    parts = attention._SharedParts.of(shared, q.device)
    _Watch.is_paused = False
    monkeypatch.setattr(attention._SharedParts, "of", lambda *_: parts)
    run("shared_prompt_attention", q, k, v, whole, longest, 0.3, shared)
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    out, lse = run("attention_block", q, k, v, (bounds, bounds), 0.3)
    run("attention_block_grad", out, (q, k, v, out, lse), (bounds, bounds), 0.3)
    w = randn(bf16, 3, 8, 8).requires_grad_()
    run("grouped_matmul", x, w, torch.tensor([1, 0, 3]))
    w.main_grad = torch.zeros(3, 8, 8)  # type: ignore[attr-defined]
    run("grouped_matmul", x, w, torch.tensor([1, 0, 3]))
    logits = randn(fp32, 4, 8).requires_grad_()
    probs, indices = run("topk_router", logits, RouterRule(**ROUTERS["deepseek_v3"]), randn(fp32, 8))
    rows, row_map = run("token_permute", x, indices)
    run("token_unpermute", rows.detach().requires_grad_(), row_map, probs.detach().requires_grad_())
    run("token_unpermute", rows.detach().requires_grad_(), row_map, topk=4)
    lse_T, _ = run("log_sum_exp", x.detach(), with_mean=True)
    run("cross_entropy_grad", x.detach(), lse_T, torch.zeros(4, dtype=torch.int64), torch.ones(4))
    state = randn(fp32, 3, 10).abs().unbind()
    how = AdamwSettings(1, 1e-2, (0.9, 0.95), 1e-8, weight_decay=0.1, grad_scale=0.5)
    run("adamw_step", state[0], torch.ones(10), *state[1:], how, torch.zeros(10, dtype=bf16))
    assert covered == set(cuda.names)


def test_fp8_products_wait_for_nothing(no_host: None) -> None:
    """Where experts' blocks of tokens begin is found out on the device."""
    ops = cuda_ops(fp8="e4m3", fp8_recipe="blockwise")
    x, w = (randn(torch.bfloat16, *shape).requires_grad_() for shape in ((4, 8), (3, 8, 16)))
    ops.grouped_matmul(x, w, torch.tensor([1, 0, 3])).backward(torch.ones(4, 16, dtype=torch.bfloat16))
    linear(x, w[0].t(), products_of(ops)).backward(torch.ones(4, 16, dtype=torch.bfloat16))
