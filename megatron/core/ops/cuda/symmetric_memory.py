"""Products and the collectives of sequence parallelism in one op, on torch's symmetric memory.

Every rank reads the others' parts over NVLink, and multiplies one part while the next arrives. Limits: the ranks of a
group reach each other's memory, and each sees its device under a number of its own. The ops are alpha
(https://docs.pytorch.org/docs/main/distributed/symmetric_memory.html) and have no CPU form: tests put torch's own
composition in their place, and the ops themselves are checked where there are two GPUs (``table.ONLY_ON_GPU``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # makes the ops
from torch import Tensor


class SymmetricMemoryOverlap:
    """See ``contract.TensorParallelOverlap``."""

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Let the ranks map one another's memory, as the ops will; ValueError when they cannot."""
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            symm_mem.rendezvous(symm_mem.empty(1, dtype=torch.uint8, device=device), group.group_name)
        except RuntimeError as error:
            raise ValueError(
                f"tp_comm_overlap=True: the {group.size()} tensor-parallel ranks cannot map each other's memory "
                f"({error}); it takes NVLink between them, within a node: lower tensor_model_parallel_size or leave "
                "tp_comm_overlap out"
            ) from error

    def all_gather_matmul(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [w], 0, group.group_name)
        return gathered, y

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), w, "sum", 0, group.group_name)
        return y
