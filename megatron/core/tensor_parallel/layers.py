"""Linear layers and the embedding with their weight split over tensor-parallel ranks.

Letters: T packed tokens, H hidden. With sequence parallelism activations between the layers are [T/TP, H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.ops.contract import LinearProducts, Matmul, TensorParallelOverlap, TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.weight_init import WeightInit, rank_slice
from megatron.core.transformer.transformer_config import ModelParallelConfig


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


class _SplitWeight(nn.Module):
    """A weight [rows, columns] of which this rank holds its part of dimension ``dim``, and the group that shares it."""

    weight: nn.Parameter  # None without has_weight

    def __init__(
        self,
        config: ModelParallelConfig,
        groups: ProcessGroups,
        rows: int,
        columns: int,
        *,
        dim: int,
        stride: int = 1,
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        self.group, self.dim = groups.tp, dim
        self.sequence_parallel = config.sequence_parallel
        if not has_weight:
            self.register_parameter("weight", None)
            return
        shape, size = [rows, columns], groups.tp.size()
        if shape[dim] % size:
            raise ValueError(f"size {shape[dim]} does not divide over tensor_model_parallel_size {size}")
        shape[dim] //= size
        self.weight = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=dim, stride=stride)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with this rank's part of the tensor ``name``."""
        if self.weight is not None:
            shape = list(self.weight.shape)
            shape[self.dim] *= self.group.size()
            self.copy_parts(init.normal(name, *shape))

    def copy_parts(self, *full: Tensor) -> None:
        """Fill the weight from full tensors, of each of which this rank takes its part."""
        parts = [rank_slice(tensor, self.dim, self.group.rank(), self.group.size()) for tensor in full]
        with torch.no_grad():
            self.weight.copy_(torch.cat(parts))

    def _sum_over_ranks(self, partial: Tensor) -> Tensor:
        """Add the ranks' [T, H]: this rank's rows with sequence parallelism, otherwise all of them."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(partial, self.group)
        return reduce_from_tensor_model_parallel_region(partial, self.group)


class ColumnParallelLinear(_SplitWeight):
    """``y = x W^T`` with the rows of W [out/TP, in] split: every rank gives its part of the outputs.

    With ``sequence_parallel`` x is [T/TP, in] and is gathered here, and again for the weight gradient, so that only the
    shard is kept; otherwise x is [T, in], the same on all ranks. y is [T, out/TP]. W may stack ``stride`` tensors, of
    which every rank holds a shard. ``bias``: a vector [out/TP] is added to y. Without ``has_weight`` the layer has no
    weight of its own, and ``forward`` is given one.
    """

    def __init__(
        self,
        config: ModelParallelConfig,
        groups: ProcessGroups,
        ops: TrainOps,
        input_size: int,
        output_size: int,
        *,
        stride: int = 1,
        bias: bool = False,
        has_weight: bool = True,
    ) -> None:
        super().__init__(config, groups, output_size, input_size, dim=0, stride=stride, has_weight=has_weight)
        self.products, self.overlap = products_of(ops), ops.tensor_parallel_overlap
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size // groups.tp.size(), dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=stride)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        weight = self.weight if weight is None else weight
        assert weight is not None, "a layer without a weight of its own must be given one"
        y: Tensor
        if self.sequence_parallel and self.group.size() > 1:
            y = _GatherLinear.apply(x, weight, self.group, self.products, self.overlap)
        else:
            y = linear(copy_to_tensor_model_parallel_region(x, self.group), weight, self.products)
        return y if self.bias is None else y + self.bias

    def init_weights(self, init: WeightInit, name: str) -> None:
        super().init_weights(init, name)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class OutputLinear(ColumnParallelLinear):
    """The logits [S, V/TP] of chosen tokens, or of all T; only the chosen rows of x are kept for the gradient."""

    def forward(self, x: Tensor, weight: Tensor | None = None, rows_S: Tensor | None = None) -> Tensor:
        if rows_S is None:
            return super().forward(x, weight)
        weight = self.weight if weight is None else weight
        assert weight is not None and self.bias is None
        to_all = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        return linear(to_all(x, self.group).index_select(0, rows_S), weight, self.products)


class RowParallelLinear(_SplitWeight):
    """``y = x W^T`` with the columns of W [out, in/TP] split: the ranks' partial outputs are added.

    x is [T, in/TP]. With ``sequence_parallel`` y is [T/TP, out], otherwise [T, out].
    """

    def __init__(
        self, config: ModelParallelConfig, groups: ProcessGroups, ops: TrainOps, input_size: int, output_size: int
    ) -> None:
        super().__init__(config, groups, output_size, input_size, dim=1)
        self.products, self.overlap = products_of(ops), ops.tensor_parallel_overlap

    def forward(self, x: Tensor) -> Tensor:
        if self.overlap is not None and self.sequence_parallel and self.group.size() > 1:
            y: Tensor = _LinearScatter.apply(x, self.weight, self.group, self.products, self.overlap)
            return y
        return self._sum_over_ranks(linear(x, self.weight, self.products))


class SequenceToSequenceLinear(ColumnParallelLinear):
    """``y = x W^T`` from [T/TP, in] to [T/TP, out]: a rank computes its outputs of all tokens; an all-to-all follows.

    Compared to ``ReplicatedLinear``, weight, gradient and optimizer state take 1/TP of the memory, and no gradients are
    summed over TP, so copies cannot drift apart. In return x is gathered, once more in backward, and the outputs are
    exchanged once in each direction.
    """

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return all_to_all_hp2sp(super().forward(x, weight), self.group)


class ReplicatedLinear(nn.Module):
    """``y = x W^T`` on the sequence shard [T/TP, in] -> [T/TP, out]; every rank holds W, whose gradient is partial."""

    def __init__(self, config: ModelParallelConfig, ops: TrainOps, input_size: int, output_size: int) -> None:
        super().__init__()
        self.products = products_of(ops)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.products)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with the tensor ``name``."""
        with torch.no_grad():
            self.weight.copy_(init.normal(name, *self.weight.shape))


class VocabParallelEmbedding(_SplitWeight):
    """Embedding with the vocabulary split, [V/TP, H] on a rank: ids int64 [T] -> [T/TP, H], or [T, H] without SP."""

    def __init__(
        self, config: ModelParallelConfig, groups: ProcessGroups, num_embeddings: int, embedding_dim: int
    ) -> None:
        super().__init__(config, groups, num_embeddings, embedding_dim, dim=0)

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.group.size() == 1:
            return F.embedding(ids_T, self.weight)
        local_vocab = self.weight.shape[0]
        local_T = ids_T - self.group.rank() * local_vocab
        elsewhere_T = (local_T < 0) | (local_T >= local_vocab)
        found_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self._sum_over_ranks(found_TH.masked_fill(elsewhere_T.unsqueeze(1), 0.0))


class _GatherLinear(torch.autograd.Function):
    """Gather the sequence, multiply; backward overlaps both collectives with the two matmuls."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup,
        products: LinearProducts,
        overlap: TensorParallelOverlap | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.products = group, products
        if overlap is not None:
            return overlap.all_gather_matmul(x, weight.t(), group)[1]
        return products.forward(collectives.all_gather(x, group)[0], weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gather = scatter = None
        if ctx.needs_input_grad[1]:
            gathered, gather = collectives.all_gather(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            partial = ctx.products.dgrad(grad, weight)
        if gather is not None:
            gather.wait()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x, scatter = collectives.reduce_scatter(partial, ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.products.wgrad(grad, gathered, weight)
        if scatter is not None:
            scatter.wait()
        return grad_x, grad_weight, None, None, None


class _LinearScatter(torch.autograd.Function):
    """Multiply, sum over the ranks and take this rank's rows; the gradients' gather overlaps their first product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup,
        products: LinearProducts,
        overlap: TensorParallelOverlap,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.products, ctx.overlap = group, products, overlap
        return overlap.matmul_reduce_scatter(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gathered, grad_x = ctx.overlap.all_gather_matmul(grad, weight, ctx.group)
        grad_weight = ctx.products.wgrad(gathered, x, weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


@dataclass(frozen=True)
class MatmulProducts:
    """``contract.LinearProducts`` by one matmul each, in the tensors' own dtype."""

    matmul: Matmul

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.matmul(x, w.t())

    def dgrad(self, grad: Tensor, w: Tensor) -> Tensor:
        return self.matmul(grad, w)

    def wgrad(self, grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return self.matmul(grad.t(), x)


def products_of(ops: TrainOps) -> LinearProducts:
    """How the linear layers of a table multiply."""
    return ops.linear_products or MatmulProducts(ops.matmul)


def linear(x: Tensor, weight: Tensor, products: LinearProducts) -> Tensor:
    """``x W^T`` [T, out] for x [T, in] and W [out, in], with all three products made by ``products``."""
    y: Tensor = _Linear.apply(x, weight, products)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: LinearProducts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return products.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = ctx.products.dgrad(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.products.wgrad(grad, x, weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None
