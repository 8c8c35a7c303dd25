"""What planned kernels keep for the backward pass, and which collectives are in them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.ops import TrainOps
from megatron.core.ops.cuda import cuda_ops
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, linear
from megatron.core.transformer.transformer_config import ModelParallelConfig
from tests.megatron.flash_attention_form import flash_attention_on_cpu
from tests.megatron.model_helpers import shared_prompts
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.ops import Routing, train_ops
from tools.plan.world import own_groups, planned_rank

TOKENS, HEADS, KEYS, VALUES = 96, 4, 192, 128


BOUNDS, COUNTS = torch.tensor([0, 10, TOKENS]).int(), torch.tensor([TOKENS - 1, 0, 1])
SHARED = shared_prompts([60, 60], [TOKENS - 70, 10])
# An entry's call, and the shapes of its inputs with gradients.
CUDA_CALLS: dict[str, tuple[Callable, list[tuple[int, ...]]]] = {
    "rms_norm": (lambda ops, x, w: ops.rms_norm(x, w, 1e-6), [(TOKENS, 24), (24,)]),
    "swiglu": (lambda ops, x: ops.swiglu(x), [(TOKENS, 32)]),
    "rotary_interleaved": (
        lambda ops, x: ops.rotary_interleaved(x, *(x.new_empty(TOKENS, 4, dtype=torch.float32) for _ in range(2))),
        [(TOKENS, 2, 8)],
    ),
    "core_attention": (
        lambda ops, q, k, v: ops.core_attention(q, k, v, BOUNDS, TOKENS, 0.1),
        [(TOKENS, HEADS, 24), (TOKENS, HEADS, 24), (TOKENS, HEADS, 16)],
    ),
    "core_attention of shared heads": (
        lambda ops, q, k, v: ops.core_attention(q, k, v, BOUNDS, TOKENS, 0.1),
        [(TOKENS, HEADS, 8), (TOKENS, 2, 8), (TOKENS, 2, 8)],
    ),
    "shared_prompt_attention": (
        lambda ops, q, k, v: ops.shared_prompt_attention(q, k, v, *SHARED[:2], 0.1, SHARED[2].to(q.device)),
        [(TOKENS, HEADS, 24), (TOKENS, HEADS, 24), (TOKENS, HEADS, 16)],
    ),
    "grouped_matmul": (lambda ops, x, w: ops.grouped_matmul(x, w, COUNTS), [(TOKENS, 16), (3, 16, 8)]),
    "token_permute": (lambda ops, x: ops.token_permute(x, _experts(x))[0], [(TOKENS, 8)]),
    "token_unpermute": (
        lambda ops, x, probs: ops.token_unpermute(x, _experts(x).flatten(), probs.float().view(-1, 2)),
        [(2 * TOKENS, 8), (2 * TOKENS,)],
    ),
    "token_unpermute without weights": (
        lambda ops, x: ops.token_unpermute(x, _experts(x).flatten(), topk=2),
        [(2 * TOKENS, 8)],
    ),
}


def _experts(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(2 * TOKENS, device=x.device).view(-1, 2)


def _kept_by(ops: TrainOps, call: Callable, shapes: list[tuple[int, ...]], device: str) -> list[tuple]:
    """Shape and dtype of every tensor that is kept; and the shapes of the output and the gradients."""
    leaves = [torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for shape in shapes]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = call(ops, *leaves)
    grads = torch.autograd.grad(out, leaves, torch.zeros_like(out))
    return [(tuple(x.shape), x.dtype) for x in (out, *grads, *sorted(kept, key=lambda x: (str(x.dtype), *x.shape)))]


@pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, and flash attention with packed log-sum-exps")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("entry", CUDA_CALLS)
def test_planned_entries_of_cuda_keep_what_the_real_ones_keep(entry: str) -> None:
    call, shapes = CUDA_CALLS[entry]
    with flash_attention_on_cpu():
        real = _kept_by(cuda_ops(), call, shapes, "cpu")
    assert _kept_by(train_ops("cuda", Routing()), call, shapes, "meta") == real


@pytest.mark.needs_torch("2.10", "torch.nn.functional.grouped_mm, without which there is no table")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("call", "shapes"),
    [(lambda ops, x, w: linear(x, w, ops.linear_products), [(TOKENS, 16), (24, 16)]), CUDA_CALLS["grouped_matmul"]],
)
def test_planned_fp8_products_allocate_what_the_real_ones_do(call: Callable, shapes: list[tuple[int, ...]]) -> None:
    """Beside what is kept: the bytes of the quantised copies."""
    planned = train_ops("cuda", Routing(), has_fp8=True)
    found = []
    for ops, device in ((cuda_ops(fp8="e4m3", fp8_recipe="blockwise"), "cpu"), (planned, "meta")):
        with _Fp8Bytes() as copies:
            found.append((_kept_by(ops, call, shapes, device), copies.total))
    assert found[0] == found[1] and copies.total > 0


class _Fp8Bytes(TorchDispatchMode):
    """How many e4m3 elements and float32 scales are allocated."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format and out.dtype in (torch.float8_e4m3fn, torch.float32):
            self.total += out.nbytes
        return out


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


def _calls_of_two_layers(tp_comm_overlap: bool) -> list[Collective]:
    log = CollectiveLog()
    with planned_rank(0, 2, 2), PlannedDevice(log, MemoryMeter()), torch.device("meta"):
        groups = own_groups(ParallelLayout(world_size=2, tensor_model_parallel_size=2), 0)
        config = ModelParallelConfig(sequence_parallel=True, params_dtype=torch.bfloat16)
        ops = train_ops("cuda", Routing(), tp_comm_overlap=tp_comm_overlap)
        up, down = (kind(config, groups, ops, 8, 8) for kind in (ColumnParallelLinear, RowParallelLinear))
        x = torch.zeros(6, 8, dtype=torch.bfloat16, requires_grad=True)
        y = down(up(x))
        y.backward(torch.ones_like(y))
        assert y.shape == x.shape and all(layer.weight.grad.shape == layer.weight.shape for layer in (up, down))
    return log.calls


@pytest.mark.needs_torch("2.10", "the fused ops of symmetric memory, as the CUDA table needs them")
def test_products_beside_collectives_are_planned_with_the_same_collectives() -> None:
    calls = _calls_of_two_layers(tp_comm_overlap=True)
    assert [call.kind for call in calls[:2]] == ["all_gather", "reduce_scatter"] and len(calls) == 5
    assert calls == _calls_of_two_layers(tp_comm_overlap=False)
    with pytest.raises(ValueError, match="tp_comm_overlap=True, but the train ops of npu have no such form; leave it"):
        train_ops("npu", Routing(), tp_comm_overlap=True)
