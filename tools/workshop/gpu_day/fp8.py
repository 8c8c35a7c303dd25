"""FP8 products of the rollout: whether they are those of their specification, and how much faster than bf16."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import NamedTuple

import torch

from hf_formats.fp8 import BLOCK, quantize
from tools.workshop.bench.models import CHECKPOINTS
from tools.workshop.gpu_day.engines import ROLLOUT_OPS, gap, new_engine
from tools.workshop.gpu_day.rows import Rows
from tools.workshop.gpu_day.speed import decode_seconds, prefill_seconds, quickest, sizes_of
from vllm.ops import reference_fp8
from vllm.ops.contract import RolloutOps
from vllm.ops.contract import resolve as resolve_rollout
from vllm.ops.weights import BlockScales, Fp8Operand


class Products(NamedTuple):
    """Sizes of single products: tokens of a decode step and of prompts, channels, the width and number of experts."""

    tokens: tuple[int, ...]
    hidden: int
    outputs: int
    width: int
    num_experts: int
    top_k: int


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
        experts = x, w13, w2, torch.rand(tokens, sizes.top_k, device=device), ids, 0
        flops = {"linear": 2 * down.values.numel() * tokens, "experts": 6 * sizes.width * sizes.hidden * ids.numel()}
        wanted = {"linear": reference_fp8.linear(x, down), "experts": reference_fp8.fused_experts(*experts)}
        for table, ops in tables.items():
            calls = {"linear": partial(ops.linear, x, down), "experts": partial(ops.fused_experts, *experts)}
            for name, call in calls.items():
                what, (took, found) = f"{table}{name} of {tokens} tokens", quickest(device, call)
                off = gap(found, wanted[name])
                rows.holds(what, off <= 1e-2, f"off by {off:.1e} of the largest value")
                note = f"{1e6 * took:.0f} us, {read[name] / took / 1e9:.0f} GB/s of weights"
                rows.measured(what, flops[name] / took / 1e12, "TFLOP/s", note=note)


def _weight(device: str, outputs: int, inputs: int, num_experts: int | None = None) -> Fp8Operand:
    blocks = [quantize(torch.randn(outputs, inputs, device=device) / inputs**0.5) for _ in range(num_experts or 1)]
    values, scales = (torch.stack(parts) for parts in zip(*(block[:2] for block in blocks), strict=True))
    if num_experts is None:
        values, scales = values[0], scales[0]
    row_blocks = torch.arange(outputs, device=device) // BLOCK
    return Fp8Operand(values, BlockScales(scales, row_blocks, None, torch.bfloat16, True))
