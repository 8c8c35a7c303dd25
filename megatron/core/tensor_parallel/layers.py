"""Linear layers and the embedding with their weight split over tensor-parallel ranks.

Letters: T packed tokens, H hidden. With sequence parallelism activations between the layers are [T/TP, H].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.ops import reference
from megatron.core.ops.contract import Matmul
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.weight_init import WeightInit, rank_slice


def set_tensor_model_parallel_attributes(
    param: nn.Parameter,
    *,
    is_parallel: bool,
    dim: int = -1,
    stride: int = 1,
    allreduce: bool = True,
    sequence_parallel: bool = False,
) -> None:
    """Set the attributes of a parameter that the optimizer and the gradient reduction read.

    tensor_model_parallel: split over TP along ``partition_dim``, where ``partition_stride`` tensors follow one another,
    each of them split (2: gate and up). allreduce: its gradient is summed over dp_cp (False: an expert, summed over
    edp). sequence_parallel: whole on every TP rank with a partial gradient, to be summed over tp.
    """
    marks = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
        "allreduce": allreduce,
        "sequence_parallel": sequence_parallel,
    }
    for name, value in marks.items():
        setattr(param, name, value)


class ColumnParallelLinear(nn.Module):
    """``y = x W^T`` with the rows of W [out/TP, in] split: every rank gives its part of the outputs.

    With ``sequence_parallel`` x is [T/TP, in] and is gathered here, and again for the weight gradient, so that only the
    shard is kept; otherwise x is [T, in], the same on all ranks. y is [T, out/TP]. W may stack ``stride`` tensors, of
    which every rank holds a shard. Without ``has_weight`` the layer has no weight of its own, and ``forward`` is given
    one.
    """

    weight: nn.Parameter  # None without has_weight

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        stride: int = 1,
        has_weight: bool = True,
        matmul: Matmul = reference.matmul,
    ) -> None:
        super().__init__()
        self.group = group
        self.matmul = matmul
        self.sequence_parallel = sequence_parallel and group.size() > 1
        if not has_weight:
            self.register_parameter("weight", None)
            return
        self.weight = nn.Parameter(torch.empty(_divide(output_size, group), input_size, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=stride)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.weight if weight is None else weight
        assert weight is not None, "a layer without a weight of its own must be given one"
        if self.sequence_parallel:
            y: torch.Tensor = _GatherLinear.apply(x, weight, self.group, self.matmul)
            return y
        return linear(copy_to_tensor_model_parallel_region(x, self.group), weight, self.matmul)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with this rank's rows of the tensor ``name``."""
        self.copy_rows(init.normal(name, self.weight.shape[0] * self.group.size(), self.weight.shape[1]))

    def copy_rows(self, *full: torch.Tensor) -> None:
        """Fill the weight from full tensors that are stacked along their rows; each is split over the ranks."""
        parts = [rank_slice(tensor, 0, self.group.rank(), self.group.size()) for tensor in full]
        with torch.no_grad():
            self.weight.copy_(torch.cat(parts))


class RowParallelLinear(nn.Module):
    """``y = x W^T`` with the columns of W [out, in/TP] split: the ranks' partial outputs are added.

    x is [T, in/TP]. With ``sequence_parallel`` y is [T/TP, out], otherwise [T, out].
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        matmul: Matmul = reference.matmul,
    ) -> None:
        super().__init__()
        self.group = group
        self.matmul = matmul
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(output_size, _divide(input_size, group), dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial = linear(x, self.weight, self.matmul)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.group)
        return reduce_from_tensor_model_parallel_region(partial, self.group)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with this rank's columns of the tensor ``name``."""
        full = init.normal(name, self.weight.shape[0], self.weight.shape[1] * self.group.size())
        with torch.no_grad():
            self.weight.copy_(rank_slice(full, 1, self.group.rank(), self.group.size()))


class VocabParallelEmbedding(nn.Module):
    """Embedding with the vocabulary split, [V/TP, H] on a rank: ids int64 [T] -> [T/TP, H], or [T, H] without SP."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(_divide(num_embeddings, group), embedding_dim, dtype=dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.group.size() == 1:
            return F.embedding(ids_T, self.weight)
        local_vocab = self.weight.shape[0]
        local_T = ids_T - self.group.rank() * local_vocab
        elsewhere_T = (local_T < 0) | (local_T >= local_vocab)
        found_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        partial_TH = found_TH.masked_fill(elsewhere_T.unsqueeze(1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial_TH, self.group)
        return reduce_from_tensor_model_parallel_region(partial_TH, self.group)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with this rank's rows of the tensor ``name``."""
        full = init.normal(name, self.weight.shape[0] * self.group.size(), self.weight.shape[1])
        with torch.no_grad():
            self.weight.copy_(rank_slice(full, 0, self.group.rank(), self.group.size()))


class _GatherLinear(torch.autograd.Function):
    """Gather the sequence, multiply; backward overlaps both collectives with the two matmuls."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, matmul: Matmul
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.matmul = group, matmul
        return matmul(collectives.all_gather(x, group)[0], weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gather = scatter = None
        if ctx.needs_input_grad[1]:
            gathered, gather = collectives.all_gather(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            partial = ctx.matmul(grad, weight)
        if gather is not None:
            gather.wait()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x, scatter = collectives.reduce_scatter(partial, ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.matmul(grad.t(), gathered)
        if scatter is not None:
            scatter.wait()
        return grad_x, grad_weight, None, None


def linear(x: torch.Tensor, weight: torch.Tensor, matmul: Matmul) -> torch.Tensor:
    """``x W^T`` [T, out] for x [T, in] and W [out, in], with all three products made by ``matmul``."""
    y: torch.Tensor = _Linear.apply(x, weight, matmul)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, matmul: Matmul) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.matmul = matmul
        return matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = ctx.matmul(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.matmul(grad.t(), x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def _divide(size: int, group: dist.ProcessGroup) -> int:
    if size % group.size():
        raise ValueError(f"size {size} does not divide over tensor_model_parallel_size {group.size()}")
    return size // group.size()
