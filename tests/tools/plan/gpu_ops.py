"""The table of NVIDIA devices without its kernels: what it allocates and what torch computes stays, values do not."""

from __future__ import annotations

from dataclasses import replace

from vllm.ops import reference
from vllm.ops.contract import RolloutOps
from vllm.ops.cuda.table import cuda_table


def rollout_ops() -> RolloutOps:
    """For runs whose course depends on no values but the choices of experts, which are the reference's: Triton's
    interpreter would take minutes for them.
    """
    table = cuda_table(launch=lambda name, grid, *arguments, **options: None)
    return replace(table, topk_router=reference.topk_router)
