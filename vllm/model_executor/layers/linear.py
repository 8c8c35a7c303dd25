"""Linear layers and embeddings that hold this rank's shard and know which shard it is.

Weights are [out, in] as in checkpoints; the op table decides how those of products lie in memory (`new_weight`).
Letters: T tokens, B rows, H hidden size, I inputs of a product, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.model_loader.weight_view import WeightView, view_of, whole_view
from vllm.ops.contract import RolloutOps

ALONE = GroupCoordinator(0, 1, None)


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter to be loaded, without gradient, on the default device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def local_slice(size: int, tp: GroupCoordinator) -> slice:
    """This rank's share of a dimension of `size`."""
    share = size // tp.world_size
    return slice(tp.rank_in_group * share, (tp.rank_in_group + 1) * share)


class ColumnParallelLinear(nn.Module):
    """Output rows split over TP (not split with tp=ALONE).

    Several matrices of the same input may share one product.
    """

    def __init__(self, in_size: int, out_sizes: Sequence[int], ops: RolloutOps, tp: GroupCoordinator = ALONE) -> None:
        super().__init__()
        self.ops = ops
        self.in_size, self.out_sizes, self.tp = in_size, list(out_sizes), tp
        self.weight = ops.new_weight([size // tp.world_size for size in out_sizes], in_size)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, sum(out) / TP], the matrices' outputs one after the other."""
        return self.ops.linear(x_TI, self.ops.operand(self.weight))

    def weight_views(self, *names: str) -> dict[str, WeightView]:
        """Targets of the matrices, in the order of out_sizes."""
        result: dict[str, WeightView] = {}
        row = 0
        for part, (name, size) in enumerate(zip(names, self.out_sizes, strict=True)):
            rows, source = slice(row, row + size // self.tp.world_size), (local_slice(size, self.tp),)
            result[name] = view_of(self.weight, (size, self.in_size), source, part, rows)
            row = rows.stop
        return result


class RowParallelLinear(nn.Module):
    """Input columns split over TP; the partial outputs are summed over TP unless the caller does it."""

    def __init__(self, in_size: int, out_size: int, ops: RolloutOps, tp: GroupCoordinator) -> None:
        super().__init__()
        self.ops = ops
        self.in_size, self.out_size, self.tp = in_size, out_size, tp
        self.weight = ops.new_weight([out_size], in_size // tp.world_size)

    def forward(self, x_TI: Tensor, reduce: bool = True) -> Tensor:
        """[T, in / TP] -> [T, out]."""
        out = self.ops.linear(x_TI, self.ops.operand(self.weight))
        return self.tp.all_reduce(out) if reduce else out

    def weight_views(self, name: str) -> dict[str, WeightView]:
        columns = (slice(None), local_slice(self.in_size, self.tp))
        return {name: view_of(self.weight, (self.out_size, self.in_size), columns, 0, slice(0, self.out_size))}


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary split over TP."""

    def __init__(self, vocab_size: int, hidden_size: int, ops: RolloutOps, tp: GroupCoordinator) -> None:
        super().__init__()
        self.ops = ops
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.weight = ops.new_weight([vocab_size // tp.world_size], hidden_size, by_row=True)

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        if self.tp.world_size == 1:
            return self.ops.embedding(ids_T, self.weight)
        rows = local_slice(self.vocab_size, self.tp)
        is_elsewhere = (ids_T < rows.start) | (ids_T >= rows.stop)
        embedded = self.ops.embedding((ids_T - rows.start).masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(embedded.masked_fill_(is_elsewhere[:, None], 0.0))

    def weight_views(self, name: str) -> dict[str, WeightView]:
        rows = local_slice(self.vocab_size, self.tp)
        own = slice(0, rows.stop - rows.start)
        return {name: view_of(self.weight, (self.vocab_size, self.hidden_size), (rows,), 0, own)}


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix, split like the embedding; its logits are gathered."""

    def forward(self, x_BH: Tensor) -> Tensor:
        """[B, H] -> fp32 logits [B, V], the same on every TP rank."""
        logits = self.ops.as_float32(self.ops.linear(x_BH, self.weight))
        if self.tp.world_size == 1:
            return logits
        return self.tp.all_gather(logits).permute(1, 0, 2).reshape(len(x_BH), self.vocab_size)


class Norm(nn.Module):
    """The weight of an RMS norm, the same on every rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size)

    def weight_views(self, name: str) -> dict[str, WeightView]:
        return {name: whole_view(self.weight)}
