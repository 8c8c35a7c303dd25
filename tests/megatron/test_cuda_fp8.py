"""FP8 products of the CUDA table equal ``reference_fp8``, in layers and in models, whose training they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_formats.fp8 import quantize
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import TrainOps, reference_fp8, reference_ops, resolve
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.layers import linear
from megatron.core.transformer.transformer_config import RECOMPUTE_MODULES
from tests import fp8_block_form
from tests.megatron.cuda_op_helpers import MARKS, assert_close, randn
from tests.megatron.interpreted_casts import casts_of_a_gpu
from tests.megatron.model_helpers import make_model, packed_batch, tiny_config

pytestmark = MARKS

ALL_EXPERTS = {"moe_router_topk": 8, "moe_router_num_groups": None, "moe_router_group_topk": None}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Tokens, inputs, outputs: less than a block, and parts of second ones.
SIZES = [(5, 16, 24, torch.float32), (130, 200, 136, torch.bfloat16)]


@pytest.fixture(autouse=True)
def gpu_casts() -> Iterator[None]:
    with casts_of_a_gpu():
        yield


@pytest.fixture(scope="module")
def fp8() -> TrainOps:
    return resolve("megatron.core.ops.cuda:cuda_ops", {"fp8": "e4m3", "fp8_recipe": "blockwise"})


def specified() -> TrainOps:
    """The reference's table, with the FP8 products that are specified."""
    products = {"linear_products": reference_fp8.Fp8Products(), "grouped_matmul": reference_fp8.grouped_matmul}
    return replace(reference_ops(), **products)


def _outliers(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes, which blocks must keep apart."""
    x = randn(torch.float32, *shape, seed=seed)
    x[..., 0, :] *= 100
    x[..., -1] *= 0.01
    return x.to(dtype)


def test_blocks_are_those_of_the_format() -> None:
    """To the bit: values and scales of rows, of tokens by expert, and of weights, also transposed."""
    from megatron.core.ops.cuda import fp8

    x, w = _outliers(torch.bfloat16, 140, 150), _outliers(torch.bfloat16, 2, 140, 150)
    values, scales = fp8._quantized_rows(x[:, 1:])
    wide = values.float() * scales.repeat_interleave(128, 0)[:149].t()
    assert torch.equal(wide, reference_fp8.rounded_rows(x[:, 1:]))
    blocks = fp8.TokenBlocks.of(140, torch.tensor([0, 3, 137, 0]), x.device)
    values, scales = fp8._quantized_tokens(x, blocks)
    for expert, rows in ((1, slice(0, 3)), (2, slice(3, 140))):
        first = rows.start // 128 + expert
        wide = (values.t().float() * scales.repeat_interleave(128, 0))[first * 128 :][: rows.stop - rows.start]
        assert torch.equal(wide, reference_fp8.rounded_tokens(x[rows])), expert
    for transposed in (False, True):
        values, scales = fp8._quantized_weight(w, transposed)
        for expert in range(2):
            want = quantize(w[expert].t() if transposed else w[expert])
            assert torch.equal(values[expert].float(), want.weight_OI.float())
            assert torch.equal(scales[expert], want.scale_inv)


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "dtype"), SIZES)
def test_products_of_linear_layers(fp8: TrainOps, tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, w = _outliers(dtype, tokens, inputs), _outliers(dtype, outputs, inputs, seed=1)
    grad = _outliers(dtype, tokens, outputs, seed=2)
    found = []
    for products in (fp8.linear_products, reference_fp8.Fp8Products()):
        assert products is not None
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear(*leaves, products)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("has_sums", [False, True])
def test_linear_layers_of_many_tokens_are_those_of_cublas(has_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that are no multiple of what cuBLAS reads at a time; other widths take the kernels."""
    from megatron.core.ops.cuda import fp8

    monkeypatch.setattr(fp8, "_CUBLAS_TOKENS", 6)
    calls: list[Tensor] = []
    ours = fp8.Fp8Products(partial(fp8_block_form.scaled_mm, calls))
    for outputs, num_calls in ((512, 3), (528, 5), (520, 5)):  # of 528 the gradient of x has no whole groups
        x, w, grad = (
            _outliers(torch.bfloat16, *size, seed=sum(size)) for size in ((6, 512), (outputs, 512), (6, outputs))
        )
        sums = [randn(torch.float32, outputs, 512) for _ in range(2)]
        both: list[Any] = [ours, reference_fp8.Fp8Products()]
        for products, main_grad in zip(both, sums, strict=True):
            weight = w.clone()
            if has_sums and products is ours:
                weight.main_grad = main_grad  # type: ignore[attr-defined]
            found = products.forward(x, w), products.dgrad(grad, w), products.wgrad(grad, x, weight)
            if products is ours:
                got = (*found[:2], main_grad - sums[1] if has_sums else found[2])
        assert len(calls) == num_calls
        for mine, want in zip(got, found, strict=True):
            assert_close(mine.to(want.dtype), want, TOLERANCE[torch.bfloat16])


def test_rounding_to_e4m3_costs_what_its_bits_say() -> None:
    """4 bits of significand: up to 1/16 of a value, some 2.6% of a block's norm, on both sides of a product."""
    x, w, grad = (randn(torch.float32, *shape, seed=sum(shape)) for shape in ((130, 200), (136, 200), (130, 136)))
    products = reference_fp8.Fp8Products()
    found = products.forward(x, w), products.dgrad(grad, w), products.wgrad(grad, x, w)
    for got, want in zip(found, (x @ w.t(), grad @ w, grad.t() @ x), strict=True):
        assert 0.03 < (got - want).norm() / want.norm() < 0.045


@pytest.mark.parametrize(
    ("counts", "dtype"), [([3, 0, 130, 0, 127], torch.bfloat16), ([0, 0, 1], torch.float32), ([0, 0], torch.bfloat16)]
)
def test_products_of_experts(fp8: TrainOps, counts: list[int], dtype: torch.dtype) -> None:
    """Experts without rows, blocks that begin anywhere, and no rows at all."""
    x = _outliers(dtype, sum(counts), 24) if sum(counts) else torch.zeros(0, 24, dtype=dtype)
    w, grad = _outliers(dtype, len(counts), 24, 40, seed=1), randn(dtype, sum(counts), 40, seed=2)
    found = []
    for ops in (fp8, specified()):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = ops.grouped_matmul(*leaves, torch.tensor(counts))
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("sums_dtype", TOLERANCE)
def test_weight_gradients_are_added_up(fp8: TrainOps, sums_dtype: torch.dtype) -> None:
    """In float32 sums nothing is rounded to the weight's dtype before."""
    x, grad = randn(torch.bfloat16, 9, 16), randn(torch.bfloat16, 9, 24, seed=1)
    layers: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
        (torch.zeros(24, 16), lambda w: linear(x, w, fp8.linear_products)),
        (torch.zeros(3, 16, 24), lambda w: fp8.grouped_matmul(x, w, torch.tensor([4, 0, 5]))),
    ]
    products = reference_fp8.Fp8Products()
    wide = torch.zeros(0, dtype=torch.float32)
    by_expert = [products.wgrad(x[rows], grad[rows], wide) for rows in (slice(4), slice(0), slice(4, 9))]
    for (zeros, run), want in zip(layers, (products.wgrad(grad, x, wide), torch.stack(by_expert)), strict=True):
        before = randn(sums_dtype, *zeros.shape, seed=3)
        w = zeros.bfloat16().requires_grad_()
        w.main_grad, w.grad_added_to_main_grad = before.clone(), False  # type: ignore[attr-defined]
        run(w).backward(grad)
        assert w.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert_close(w.main_grad, (before.float() + want).to(sums_dtype), TOLERANCE[sums_dtype])  # type: ignore[attr-defined]


def test_what_is_not_a_number_stays_none(fp8: TrainOps) -> None:
    """A finite check must see it."""
    for value in (torch.nan, torch.inf):
        x, w = randn(torch.float32, 3, 16), randn(torch.float32, 8, 16, seed=1)
        x[1, 2] = value
        assert fp8.linear_products is not None
        finite = fp8.linear_products.forward(x, w).isfinite()
        assert not finite[1].any() and finite[0].all() and finite[2].all()
        assert not fp8.linear_products.wgrad(x, x, torch.zeros(16, 16)).isfinite()[2].all()
        assert not fp8.linear_products.forward(w, x).isfinite().all()  # as a weight


def test_what_the_table_says_and_refuses(fp8: TrainOps, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resolve("megatron.core.ops.cuda:cuda_ops")
    assert plain.linear_products is None and "linear_products" not in plain.names
    assert fp8.names["grouped_matmul"] == fp8.names["linear_products"] and "e4m3" in fp8.names["linear_products"]
    for choices in ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, {"fp8": "e4m3"}, {"fp8_recipe": "blockwise"}):
        with pytest.raises(ValueError, match="have fp8='e4m3' with fp8_recipe='blockwise'"):
            resolve("megatron.core.ops.cuda:cuda_ops", choices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    with pytest.raises(ValueError, match=r"fp8='e4m3' needs a GPU of compute capability 9.0 .* an A100 has 8.0"):
        resolve("megatron.core.ops.cuda:cuda_ops", {"fp8": "e4m3", "fp8_recipe": "blockwise"})


def _losses_and_gradients(ops: TrainOps, groups: ProcessGroups, steps: int = 1, **changes: Any) -> tuple[Any, ...]:
    """Losses of updates, the first one's gradients, and the weights' names."""
    model = DistributedDataParallel(
        tiny_config(), DistributedDataParallelConfig(True), make_model(tiny_config(**changes), groups, ops=ops), groups
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, weight_decay=0.0, clip_grad=1.0), model, groups, ops)
    batch, losses, grads = packed_batch([9, 17, 6], 128), [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch.ids_T, batch.positions_T, batch.params, batch.labels_T).mean()
        loss.backward()
        finalize_model_grads(model, groups)
        grads = grads or {name: param.main_grad.clone() for name, param in model.module.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, grads, list(model.module.state_dict())


def _differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - want).norm() / want.norm()) for name, want in wanted.items()}


def test_a_model_trains_near_float32(one_rank: ProcessGroups) -> None:
    """By what is specified, where every expert has every token (rounding may choose others, which is no small change):
    losses of three updates within 3%, gradients within 0.3 of their norms; no state is added to a checkpoint's.
    """
    losses, grads, names = _losses_and_gradients(specified(), one_rank, steps=3, **ALL_EXPERTS)
    exact_losses, exact, exact_names = _losses_and_gradients(reference_ops(), one_rank, steps=3, **ALL_EXPERTS)
    assert losses == pytest.approx(exact_losses, rel=3e-2) and losses[2] < losses[0]
    differences = _differences(grads, exact)
    assert min(differences.values()) > 0.02 and max(differences.values()) < 0.3, differences
    assert names == exact_names
    recomputed = {"recompute_granularity": "selective", "recompute_modules": RECOMPUTE_MODULES}
    again, grads_again, _ = _losses_and_gradients(specified(), one_rank, steps=3, **ALL_EXPERTS, **recomputed)
    assert again == losses and all(torch.equal(grads_again[name], grad) for name, grad in grads.items())


@pytest.mark.slow
def test_a_model_trains_as_specified(fp8: TrainOps, one_rank: ProcessGroups) -> None:
    """By the kernels, with recompute, weight gradients added to float32 sums. A last bit may round to another e4m3."""
    how = {"recompute_granularity": "selective", "recompute_modules": RECOMPUTE_MODULES, **ALL_EXPERTS}
    how |= {"num_layers": 2, "moe_layer_freq": [0, 1]}
    losses, grads, _ = _losses_and_gradients(fp8, one_rank, steps=2, **how)
    wanted_losses, wanted, _ = _losses_and_gradients(specified(), one_rank, steps=2, **how)
    assert losses[0] == pytest.approx(wanted_losses[0], rel=1e-3)
    assert losses[1] == pytest.approx(wanted_losses[1], rel=1e-2)  # AdamW's first step is as large for any gradient
    differences = list(_differences(grads, wanted).values())
    assert max(differences) < 0.1 and differences[-1] < 1e-4  # flips add up on the way back from the last layer
