"""The Triton kernels; importing them imports triton."""

from typing import Any

import triton

from vllm.ops.cuda._compat import allow_loops_over_loaded_bounds
from vllm.ops.cuda.kernels import decode, experts, fp8, grouped, prefill, rows, sample

is_interpreted: bool = triton.knobs.runtime.interpret

if is_interpreted:
    allow_loops_over_loaded_bounds()


def kernel_called(name: str) -> Any:
    """The kernel of that name."""
    modules = (decode, experts, fp8, grouped, prefill, rows, sample)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
