"""FP8 products of the rollout and of training: whether they are as specified, and how much faster than bf16."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, quantize
from megatron.core.ops import TrainOps, resolve
from megatron.core.ops import reference_fp8 as reference_training
from megatron.core.tensor_parallel.layers import linear, products_of
from tests.megatron.interpreted_casts import casts_of_a_gpu
from tools.workshop.bench.models import CHECKPOINTS
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, TRAIN_OPS, gap, new_engine
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import decode_seconds, prefill_seconds, quickest, sizes_of, training_steps
from vllm.ops import reference_fp8
from vllm.ops.contract import ExpertMatrices, RolloutOps
from vllm.ops.contract import resolve as resolve_rollout
from vllm.ops.cuda.fp8 import Fp8Products
from vllm.ops.cuda.launch import launch
from vllm.ops.reference_moe import silu_and_mul
from vllm.ops.weights import BlockScales, Fp8Operand


class Products(NamedTuple):
    """Sizes of single products: tokens of a decode step and of prompts, channels, the width and number of experts."""

    tokens: tuple[int, ...]
    hidden: int
    outputs: int
    width: int
    num_experts: int
    top_k: int


FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
_TOLERANCE = 1e-2  # bfloat16's; a division that rounds otherwise may change single e4m3 values
_COMPARED = 3  # steps; later ones drift apart
_LOSS_TOLERANCE = 0.05  # FP8 beside bfloat16: a rounding may send a token to another expert
_DEEP_GEMM = "vllm.ops.cuda:deep_gemm_ops"
_GPU = Products((64, 4096), 7168, 2112, 2048, 32, 8)
_TINY = Products((2,), 128, 72, 128, 1, 1)
_TINY_MODEL = CHECKPOINTS["tiny"] | {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
_TINY_MODEL |= {"first_k_dense_replace": 0, "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1}
_TINY_MODEL |= {"topk_group": 1, "n_shared_experts": 0}


def fp8_products(device: str, rows: Rows) -> None:
    """Products against their specification, then a DeepSeek-V3 layer stack in FP8 against bf16."""
    ops = resolve_rollout(ROLLOUT_OPS)
    if not ops.multiplies_fp8:
        rows.holds("FP8 products", True, f"none on this device: {ops.implementations['linear']}")
        return
    tables = {"": ops}
    if importlib.util.find_spec("deep_gemm") is not None:
        tables["DeepGEMM: "] = resolve_rollout(_DEEP_GEMM)
    _single_products(device, rows, tables)
    sizes = sizes_of(device)
    if device == "cuda":
        raw = sizes.models["MLA"]
    else:
        raw, sizes = _TINY_MODEL, sizes._replace(batch=1, context=2, prompts=(2,))
    longest = max(sizes.context + 2 * sizes.steps, *sizes.prompts) + 1
    found = []
    for quantization in (None, "fp8"):
        llm = new_engine(raw, device, sizes.batch, longest, quantization=quantization)
        found.append((decode_seconds(device, llm, raw, sizes, sizes.batch), prefill_seconds(device, llm, raw, sizes)))
        llm.shutdown()
    for name, bar, bf16_s, fp8_s in zip(("decode", "prefill"), (1.3, 1.4), *found, strict=True):
        note = f"{1e3 * fp8_s:.2f} ms after {1e3 * bf16_s:.2f} ms"
        rows.measured(f"DeepSeek-V3's layers, {name}", bf16_s / fp8_s, "times bf16", bar, note)


def _single_products(device: str, rows: Rows, tables: dict[str, RolloutOps]) -> None:
    sizes = _GPU if device == "cuda" else _TINY
    torch.manual_seed(0)
    down = _weight(device, sizes.outputs, sizes.hidden)
    w13 = _weight(device, 2 * sizes.width, sizes.hidden, sizes.num_experts)
    w2 = _weight(device, sizes.hidden, sizes.width, sizes.num_experts)
    read = {"linear": down.values.nbytes, "experts": w13.values.nbytes + w2.values.nbytes}
    for tokens in sizes.tokens:
        x = torch.randn(tokens, sizes.hidden, device=device, dtype=torch.bfloat16)
        ids = torch.rand(tokens, sizes.num_experts, device=device).topk(sizes.top_k).indices
        experts = x, (w13, w2), (torch.rand(tokens, sizes.top_k, device=device), ids), 0
        flops = {"linear": 2 * down.values.numel() * tokens, "experts": 6 * sizes.width * sizes.hidden * ids.numel()}
        wanted = {"linear": reference_fp8.linear(x, down), "experts": reference_fp8.fused_experts(*experts)}
        _steps_of_experts(rows, f"experts of {tokens} tokens", x, (w13, w2), ids)
        for table, ops in tables.items():
            calls = {"linear": partial(ops.linear, x, down), "experts": partial(ops.fused_experts, *experts)}
            for name, call in calls.items():
                what, (took, found) = f"{table}{name} of {tokens} tokens", quickest(device, call)
                off = gap(found, wanted[name])
                if name == "linear":
                    rows.holds(what, off <= _TOLERANCE, f"off by {off:.1e} of the largest value")
                else:
                    rows.measured(what, off, "of the largest value", note="off, both products after one another")
                note = f"{1e6 * took:.0f} us, {read[name] / took / 1e9:.0f} GB/s of weights"
                rows.measured(what, flops[name] / took / 1e12, "TFLOP/s", note=note)


def _steps_of_experts(rows: Rows, name: str, x: Tensor, matrices: ExpertMatrices, ids: Tensor) -> None:
    """Each of the experts' steps from what is specified before it. After one another the second product has more to
    bear: a last bit of the first may change a value in e4m3 by its last bit, up to 1/8 of it."""
    fp8, (w13, w2) = Fp8Products(launch), matrices
    sorted_S, order_S = ids.flatten().sort()
    experts_E, tokens_S = torch.arange(len(w13), device=x.device), order_S // ids.shape[1]
    ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
    gate_up_S2F = reference_fp8.grouped(x[tokens_S], w13, ends_E)
    inner_SF = silu_and_mul(gate_up_S2F)
    found = fp8.silu_and_mul(gate_up_S2F, ends_E[-1:]).values_TI.float()
    other = float((found != reference_fp8.quantize_rows(inner_SF)[0].float()).float().mean())
    rows.holds(f"{name}, values between the products", other <= _TOLERANCE, f"{other:.1e} of them are others in e4m3")
    pairs = {
        "first": (fp8.grouped(fp8.quantize(x), w13, ends_E, tokens_S), gate_up_S2F),
        "second": (fp8.grouped(fp8.quantize(inner_SF), w2, ends_E, None), reference_fp8.grouped(inner_SF, w2, ends_E)),
    }
    for product, pair in pairs.items():
        off = gap(*pair)
        rows.holds(f"{name}, {product} product", off <= _TOLERANCE, f"off by {off:.1e} of the largest value")


def _weight(device: str, outputs: int, inputs: int, num_experts: int | None = None) -> Fp8Operand:
    blocks = [quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5) for _ in range(num_experts or 1)]
    values, scales = (torch.stack(parts) for parts in zip(*(block[:2] for block in blocks), strict=True))
    if num_experts is None:
        values, scales = values[0], scales[0]
    row_blocks = torch.arange(outputs, device=device) // BLOCK
    return Fp8Operand(values, BlockScales(scales, row_blocks, None, torch.bfloat16, True))


class _Layer(NamedTuple):
    """Inputs and outputs, tokens of each expert."""

    inputs: int
    outputs: int
    counts: tuple[int, ...]


_LAYERS = (_Layer(7168, 4096, (900, 0, 1500, 3000, 77, 2715)), _Layer(2048, 576, (700, 33)))
_TINY_LAYERS = (_Layer(136, 40, (3, 0, 130)),)


def fp8_training(device: str, rows: Rows) -> None:
    """Products against what is specified, and steps beside bfloat16's."""
    with casts_of_a_gpu() if device == "cpu" else nullcontext():
        fp8, bf16 = resolve(TRAIN_OPS, FP8), resolve(TRAIN_OPS)
        for sizes in _LAYERS if device == "cuda" else _TINY_LAYERS:
            for kind, run, wanted, plain in _products(fp8, bf16, sizes, device):
                name = f"{sizes.inputs} to {sizes.outputs}"
                (took, found), (plain_took, _) = quickest(device, run), quickest(device, plain)
                off = max(gap(*pair) for pair in zip(found, wanted(), strict=True))
                rows.holds(f"{kind}, {name}, as specified", off < _TOLERANCE, f"relative difference up to {off:.1e}")
                rows.measured(f"{kind}, {name}, forward and backward", plain_took / took, "times as fast as bf16")
        _steps(fp8, bf16, device, rows)


def _steps(fp8: TrainOps, bf16: TrainOps, device: str, rows: Rows) -> None:
    """Training steps of DeepSeek-V3's layers from the same weights: their losses, and their time."""
    plain = training_steps(device, bf16)
    gc.collect()
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
    fp8: TrainOps, bf16: TrainOps, sizes: _Layer, device: str
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

    specified = reference_training.Fp8Products()
    layers = (products_of(fp8), specified, products_of(bf16))
    yield "a linear layer", *(outcome(w, lambda x, w, by=by: linear(x, w, by)) for by in layers)  # type: ignore[misc]
    experts = (fp8.grouped_matmul, reference_training.grouped_matmul, bf16.grouped_matmul)
    yield "experts", *(outcome(w_experts, lambda x, w, by=by: by(x, w, counts)) for by in experts)  # type: ignore[misc]
