"""Training with FP8 products: as `reference_fp8` specifies them, and how much quicker than bfloat16 they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.ops import TrainOps, reference_fp8, resolve
from megatron.core.tensor_parallel.layers import linear, products_of
from tests.megatron.interpreted_casts import casts_of_a_gpu
from tools.workshop.gpu_day.engines import TRAIN_OPS, gap
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import quickest, training_steps

FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
_TOLERANCE = 1e-2  # bfloat16's; a division that rounds otherwise may change single e4m3 values
_COMPARED = 3  # steps; later ones drift apart
_LOSS_TOLERANCE = 0.05  # FP8 beside bfloat16: a rounding may send a token to another expert


class _Sizes(NamedTuple):
    """Inputs and outputs, tokens of each expert."""

    inputs: int
    outputs: int
    counts: tuple[int, ...]


_GPU = {"7168 to 4096": _Sizes(7168, 4096, (900, 0, 1500, 3000, 77, 2715)), "2048 to 576": _Sizes(2048, 576, (700, 33))}
_TINY = {"136 to 40": _Sizes(136, 40, (3, 0, 130))}


def fp8_training(device: str, rows: Rows) -> None:
    """Products against what is specified, and steps beside bfloat16's."""
    with casts_of_a_gpu() if device == "cpu" else nullcontext():
        fp8, bf16 = resolve(TRAIN_OPS, FP8), resolve(TRAIN_OPS)
        for name, sizes in (_GPU if device == "cuda" else _TINY).items():
            for kind, run, wanted, plain in _products(fp8, bf16, sizes, device):
                (took, found), (plain_took, _) = quickest(device, run), quickest(device, plain)
                off = max(gap(*pair) for pair in zip(found, wanted(), strict=True))
                rows.holds(f"{kind}, {name}, as specified", off < _TOLERANCE, f"relative difference up to {off:.1e}")
                rows.measured(f"{kind}, {name}, forward and backward", plain_took / took, "times as fast as bf16")
        _steps(fp8, bf16, device, rows)


def _steps(fp8: TrainOps, bf16: TrainOps, device: str, rows: Rows) -> None:
    """Training steps of DeepSeek-V3's layers from the same weights: their losses, and their time."""
    plain = training_steps(device, bf16)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = training_steps(device, fp8)
    losses = zip(found.losses[:_COMPARED], plain.losses[:_COMPARED], strict=True)
    off = max(abs(loss - other) / abs(other) for loss, other in losses)
    rows.holds("losses beside bf16", off < _LOSS_TOLERANCE, f"relative difference up to {off:.1e}")
    for name, steps in (("bf16", plain), ("FP8", found)):
        rows.measured(f"DeepSeek-V3's layers, {name}", steps.flops / steps.seconds / 1e12, "TFLOP/s", note=steps.note)
    rows.measured("DeepSeek-V3's layers, a step", plain.seconds / found.seconds, "times as fast as bf16")


Outcome = Callable[[], list[Tensor]]


def _products(
    fp8: TrainOps, bf16: TrainOps, sizes: _Sizes, device: str
) -> Iterator[tuple[str, Outcome, Outcome, Outcome]]:
    """A name, then output and gradients of a linear layer and of experts: in FP8, as specified, and in bfloat16."""
    counts = torch.tensor(sizes.counts, device=device)
    tokens, shape = sum(sizes.counts), (sizes.inputs, sizes.outputs)
    x, grad, w, w_experts = (
        torch.randn(*size, device=device, dtype=torch.bfloat16)
        for size in ((tokens, shape[0]), (tokens, shape[1]), shape[::-1], (len(counts), *shape))
    )

    def outcome(weight: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Outcome:
        def call() -> list[Tensor]:
            leaves = [leaf.detach().requires_grad_() for leaf in (x, weight)]
            out = run(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        return call

    specified = reference_fp8.Fp8Products()
    layers = (products_of(fp8), specified, products_of(bf16))
    yield "a linear layer", *(outcome(w, lambda x, w, by=by: linear(x, w, by)) for by in layers)  # type: ignore[misc]
    experts = (fp8.grouped_matmul, reference_fp8.grouped_matmul, bf16.grouped_matmul)
    yield "experts", *(outcome(w_experts, lambda x, w, by=by: by(x, w, counts)) for by in experts)  # type: ignore[misc]
