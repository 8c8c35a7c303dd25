"""Linear layers and embeddings that hold this rank's slice and say which slice it is.

Weights are [out, in] as in checkpoints; in memory those of products lie as the op table wants them (`empty_matrix`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.quantization.fp8 import dense
from vllm.model_executor.model_loader.coded_target import CodedTarget
from vllm.model_executor.model_loader.weight_target import WeightTarget
from vllm.ops.contract import Matrices, RolloutOps
from vllm.ops.cpu.compressed import CodedMatrices, is_worth_coding

ALONE = GroupCoordinator(0, 1, None)


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter to be loaded, without gradient, on the default device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def empty_matrix(ops: RolloutOps, *shape: int) -> nn.Parameter:
    """A parameter [..., out, in] in the memory order that products of ``ops`` want: [..., in, out] unless by row."""
    if torch.get_default_dtype() in ops.by_row_dtypes:
        return empty_parameter(*shape)
    return nn.Parameter(torch.empty(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2), requires_grad=False)


def linear_weight(ops: RolloutOps, out_sizes: Sequence[int], in_size: int) -> nn.Parameter | CodedMatrices:
    """Matrices of one input, one below the other: coded where the op table takes that and it pays."""
    size = out_sizes[0]
    is_coded = torch.get_default_dtype() in ops.coded_dtypes and all(other == size for other in out_sizes)
    if is_coded and is_worth_coding(size, in_size):
        return CodedMatrices(1, len(out_sizes), size, in_size)
    return empty_matrix(ops, sum(out_sizes), in_size)


def operand(weight: nn.Parameter | CodedMatrices) -> Matrices:
    """A weight as products take it."""
    return weight if isinstance(weight, CodedMatrices) else dense(weight)


def local_slice(size: int, tp: GroupCoordinator) -> slice:
    """This rank's part of a dimension of `size`."""
    part = size // tp.world_size
    return slice(tp.rank_in_group * part, (tp.rank_in_group + 1) * part)


def add_in_parts(x_TH: Tensor, of_TH: Tensor, layer: Callable[[Tensor], Tensor], num_tokens: int) -> Tensor:
    """x + layer(of), of at most `num_tokens` tokens (0: of all) at a time; x may be overwritten."""
    if num_tokens == 0 or len(x_TH) <= num_tokens:
        return layer(of_TH).add_(x_TH)
    for part_tH, of_tH in zip(x_TH.split(num_tokens), of_TH.split(num_tokens), strict=True):
        part_tH += layer(of_tH)
    return x_TH


class ColumnParallelLinear(nn.Module):
    """Output rows split over TP (over nobody with tp=ALONE).

    Several matrices of the same input may share one product.
    """

    def __init__(self, in_size: int, out_sizes: Sequence[int], ops: RolloutOps, tp: GroupCoordinator = ALONE) -> None:
        super().__init__()
        self.ops = ops
        self.in_size, self.out_sizes, self.tp = in_size, list(out_sizes), tp
        self.weight = linear_weight(ops, [size // tp.world_size for size in out_sizes], in_size)

    def forward(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, sum(out) / TP], the matrices' outputs one after the other."""
        return self.ops.linear(x_TI, operand(self.weight))

    def targets(self, *names: str) -> dict[str, WeightTarget]:
        """Targets of the matrices, in the order of out_sizes."""
        result: dict[str, WeightTarget] = {}
        row = 0
        for part, (name, size) in enumerate(zip(names, self.out_sizes, strict=True)):
            local, shape, source = size // self.tp.world_size, (size, self.in_size), (local_slice(size, self.tp),)
            if isinstance(self.weight, CodedMatrices):
                result[name] = CodedTarget(shape, self.weight.code, source=source, matrix=self.weight.matrix(0, part))
            else:
                result[name] = WeightTarget(shape, self.weight, (slice(row, row + local),), source)
            row += local
        return result


class RowParallelLinear(nn.Module):
    """Input columns split over TP; the partial outputs are summed over TP unless the caller does it."""

    def __init__(self, in_size: int, out_size: int, ops: RolloutOps, tp: GroupCoordinator) -> None:
        super().__init__()
        self.ops = ops
        self.in_size, self.out_size, self.tp = in_size, out_size, tp
        self.weight = linear_weight(ops, [out_size], in_size // tp.world_size)

    def forward(self, x_TI: Tensor, reduce: bool = True) -> Tensor:
        """[T, in / TP] -> [T, out]."""
        out = self.ops.linear(x_TI, operand(self.weight))
        return self.tp.all_reduce(out) if reduce else out

    def targets(self, name: str) -> dict[str, WeightTarget]:
        columns = (slice(None), local_slice(self.in_size, self.tp))
        if isinstance(self.weight, CodedMatrices):
            matrix = self.weight.matrix(0, 0)
            return {name: CodedTarget((self.out_size, self.in_size), self.weight.code, source=columns, matrix=matrix)}
        return {name: WeightTarget((self.out_size, self.in_size), self.weight, (slice(None), slice(None)), columns)}


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary split over TP."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: GroupCoordinator) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.tp = vocab_size, hidden_size, tp
        self.weight = empty_parameter(vocab_size // tp.world_size, hidden_size)

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T] -> [T, H]."""
        if self.tp.world_size == 1:
            return F.embedding(ids_T, self.weight)
        local_ids = ids_T - self.tp.rank_in_group * len(self.weight)
        is_elsewhere = (local_ids < 0) | (local_ids >= len(self.weight))
        embedded = F.embedding(local_ids.masked_fill(is_elsewhere, 0), self.weight)
        return self.tp.all_reduce(embedded.masked_fill_(is_elsewhere[:, None], 0.0))

    def targets(self, name: str) -> dict[str, WeightTarget]:
        rows = (local_slice(self.vocab_size, self.tp),)
        return {name: WeightTarget((self.vocab_size, self.hidden_size), self.weight, (slice(None),), rows)}


class ParallelLMHead(VocabParallelEmbedding):
    """The output matrix, split like the embedding; its logits are gathered."""

    def __init__(self, vocab_size: int, hidden_size: int, ops: RolloutOps, tp: GroupCoordinator) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.ops = ops

    def forward(self, x_BH: Tensor) -> Tensor:
        """[B, H] -> fp32 logits [B, V], the same on every TP rank."""
        logits = self.ops.linear(x_BH, self.weight).float()
        if self.tp.world_size == 1:
            return logits
        return self.tp.all_gather(logits).permute(1, 0, 2).reshape(len(x_BH), self.vocab_size)


class Norm(nn.Module):
    """The weight of an RMS norm, the same on every rank."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size)

    def targets(self, name: str) -> dict[str, WeightTarget]:
        return {name: WeightTarget(tuple(self.weight.shape), self.weight, (slice(None),), (slice(None),))}
