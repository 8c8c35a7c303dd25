"""The Triton kernels; importing them imports triton."""

import triton

from vllm.ops.cuda._compat import allow_loops_over_loaded_bounds
from vllm.ops.cuda.kernels.decode import decode_attention, merge_splits
from vllm.ops.cuda.kernels.experts import sum_of_experts, topk_router
from vllm.ops.cuda.kernels.fp8 import block_product, quantize_rows, silu_and_mul_quantized, sum_of_splits
from vllm.ops.cuda.kernels.grouped import grouped_product
from vllm.ops.cuda.kernels.prefill import prefill_attention
from vllm.ops.cuda.kernels.rows import norm_rope_write_kv, rms_norm, rope_write_gqa, rotary_interleaved, silu_and_mul
from vllm.ops.cuda.kernels.sample import choose_part, sample_parts

is_interpreted: bool = triton.knobs.runtime.interpret

if is_interpreted:
    allow_loops_over_loaded_bounds()

__all__ = [
    "block_product",
    "choose_part",
    "decode_attention",
    "grouped_product",
    "is_interpreted",
    "merge_splits",
    "norm_rope_write_kv",
    "prefill_attention",
    "quantize_rows",
    "rms_norm",
    "rope_write_gqa",
    "rotary_interleaved",
    "sample_parts",
    "silu_and_mul",
    "silu_and_mul_quantized",
    "sum_of_experts",
    "sum_of_splits",
    "topk_router",
]
