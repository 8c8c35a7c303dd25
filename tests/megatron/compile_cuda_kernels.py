"""Compiles every Triton kernel of the CUDA table for an H100, on any machine, and prints their names.

`python compile_cuda_kernels.py [every]`: every form of them, else one of the slow ones.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.core.ops.cuda.kernels import experts, fp8, rows, vocab

H100 = GPUTarget("cuda", 90, 32)
HALF, FLOAT, LONG, INT = "*bf16", "*fp32", "*i64", "*i32"
TYPES = dict.fromkeys(("x", "weight", "out", "grad", "grad_x", "logits", "rows", "grad_rows", "products"), HALF)
TYPES |= dict.fromkeys(("inverse", "parts", "cos", "sin", "lse", "mean", "sums", "probs", "grad_probs", "bias"), FLOAT)
TYPES |= dict.fromkeys(("target", "row_map", "chosen"), LONG) | {"ends": INT, "eps": "fp32", "sign": "fp32"}
TYPES |= {"experts": INT} | dict.fromkeys(("scales", "x_scales", "w_scales", "a_scales", "b_scales"), FLOAT)
FP8 = "*fp8e4nv"
QUANTIZED = {"values": FP8, "w": HALF}
ALONE = {"GROUPED": False, "ends": None, "experts": None}
WEIGHTED = {"TOPK": 8, "BLOCK": 1024, "WEIGHTED": True}
NOT_WEIGHTED = WEIGHTED | {"WEIGHTED": False, "probs": None}
CHOICE = {"TOPK": 8, "HAS_BIAS": False, "bias": None}
IN_GROUPS = {"TOPK": 8, "HAS_BIAS": True, "SCORES": "sigmoid", "BEST_OF_GROUP": 2, "GROUPS": 8, "SIZE": 32}
CASES: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (rows.rms_norm, {"BLOCK": 8192}, {}),
    (rows.rms_norm_grad, {"ROWS": 16, "BLOCK": 8192}, {}),
    (rows.swiglu, {"BLOCK": 1024}, {}),
    (rows.swiglu_grad, {"BLOCK": 1024}, {}),
    (rows.rotary, {"HEADS": 64, "PAIRS": 32}, {}),
    (vocab.log_sum_exp, {"VOCAB": 129_280, "BLOCK": 4096, "WITH_MEAN": True}, {}),
    (vocab.log_sum_exp, {"VOCAB": 129_280, "BLOCK": 4096, "WITH_MEAN": False, "mean": None}, {}),
    (vocab.cross_entropy_grad, {"BLOCK": 4096}, {"grad": FLOAT}),
    (experts.add_rows, WEIGHTED, {}),
    (experts.add_rows, NOT_WEIGHTED, {}),
    (experts.add_rows_grad, WEIGHTED | {"WIDTH": 7168}, {}),
    (experts.add_rows_grad, NOT_WEIGHTED | {"WIDTH": 7168, "grad_probs": None}, {}),
    (experts.choose, IN_GROUPS | {"GROUP_TOPK": 4}, {"logits": FLOAT}),
    (
        experts.choose,
        CHOICE | {"SCORES": "softmax", "BEST_OF_GROUP": 1, "GROUPS": 4, "SIZE": 64, "GROUP_TOPK": 2},
        {"logits": FLOAT},
    ),
    (
        experts.choose,
        CHOICE | {"SCORES": "logits", "BEST_OF_GROUP": 0, "GROUPS": 1, "SIZE": 128, "GROUP_TOPK": 0},
        {"logits": FLOAT},
    ),
    (experts.add_products, {"BLOCK": 4096}, {}),
    (experts.clear_idle, {"BLOCK": 4096}, {}),
    (fp8.quantize_rows, {"ROWS": 32}, QUANTIZED),
    (fp8.quantize_tokens, {"COLUMNS": 64, "GROUPED": True}, QUANTIZED),
    (fp8.quantize_weight, {"TRANSPOSED": True}, QUANTIZED),
    (fp8.multiply, {"ROWS_TOGETHER": 8, "GROUPED": True}, {"x": FP8, "w": FP8}),
    (fp8.multiply_tokens, {"ADDS": True, "GROUPED": True}, {"a": FP8, "b": FP8, "out": FLOAT}),
]
OF_LINEAR_LAYERS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    (fp8.quantize_tokens, {"COLUMNS": 64} | ALONE, QUANTIZED),
    (fp8.multiply, {"ROWS_TOGETHER": 8} | ALONE, {"x": FP8, "w": FP8}),
    (fp8.multiply_tokens, {"ADDS": False, "GROUPED": False, "ends": None}, {"a": FP8, "b": FP8}),
]
# Kernels that must use the tensor cores of an H100 for e4m3.
TENSOR_CORE_KERNELS = (fp8.multiply, fp8.multiply_tokens)


def main() -> None:
    for kernel, constants, types in CASES + (OF_LINEAR_LAYERS if "every" in sys.argv else []):
        names = [parameter.name for parameter in kernel.params]
        signature = {name: "constexpr" if name in constants else (TYPES | types).get(name, "i32") for name in names}
        multiplies = kernel in TENSOR_CORE_KERNELS
        compiled = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants),
            target=H100,
            options={"num_warps": 8, "num_stages": 4} if multiplies else None,
        )
        assert compiled.asm["cubin"]
        assert not multiplies or "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
        print(kernel.__name__)


if __name__ == "__main__":
    main()
