"""Rows of a tensor that several sequences share: each is computed once, and taken as often as it is needed.

Letters: T rows that are computed, F rows that are taken, P of the T that are taken more than once, C times at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.utils import async_h2d


@dataclass(frozen=True)
class TakenRows:
    """Which of T rows are taken, in which order; gradients of a row that is taken several times are added in order.

    ``index_select`` would do the same, but its backward adds in any order on an accelerator.

    Attributes:
        index_F: the row of each one that is taken, int64 [F].
        once_2N: the rows that are taken once, and where, int64 [2, N].
        repeated_P: the rows that are taken more than once, int64 [P].
        places_PC: where they are, int64 [P, C]; a row that is taken fewer times repeats its first place.
        counts_PC: 0 for such a repetition, else 1, fp32 [P, C].
        num_rows: T.
    """

    index_F: Tensor
    once_2N: Tensor
    repeated_P: Tensor
    places_PC: Tensor
    counts_PC: Tensor
    num_rows: int

    @classmethod
    def of(cls, index_F: Tensor, num_rows: int) -> TakenRows:
        """From ``index_F`` on the host."""
        counts_T = torch.bincount(index_F, minlength=num_rows)
        order_F = index_F.argsort(stable=True)  # the places of row 0, then those of row 1, ...
        starts_T = counts_T.cumsum(0) - counts_T
        (once_N,), (repeated_P,) = ((counts_T == 1).nonzero(as_tuple=True), (counts_T > 1).nonzero(as_tuple=True))
        width = int(counts_T.max()) if len(repeated_P) else 0
        steps_PC = torch.arange(width).expand(len(repeated_P), width)
        is_taken_PC = steps_PC < counts_T[repeated_P, None]
        places_PC = order_F[starts_T[repeated_P, None] + steps_PC * is_taken_PC]
        once_2N = torch.stack((once_N, order_F[starts_T[once_N]]))
        return cls(index_F, once_2N, repeated_P, places_PC, is_taken_PC.float(), num_rows)

    def to(self, device: torch.device) -> TakenRows:
        """The same with its tensors on ``device``, for which the host does not wait."""
        return TakenRows(
            async_h2d(self.index_F, device),
            async_h2d(self.once_2N, device),
            async_h2d(self.repeated_P, device),
            async_h2d(self.places_PC, device),
            async_h2d(self.counts_PC, device),
            self.num_rows,
        )

    def take(self, rows: Tensor) -> Tensor:
        """[T, ...] -> [F, ...]."""
        assert len(rows) == self.num_rows, f"{len(rows)} rows; these are of {self.num_rows}"
        taken: Tensor = _Take.apply(rows, self)
        return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: TakenRows) -> Tensor:
        ctx.taken = taken
        return rows.index_select(0, taken.index_F)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        taken: TakenRows = ctx.taken
        targets_N, places_N = taken.once_2N
        out = grad.new_zeros((taken.num_rows, *grad.shape[1:]))
        out.index_copy_(0, targets_N, grad.index_select(0, places_N))
        if len(taken.repeated_P):
            copies = grad.index_select(0, taken.places_PC.flatten()).unflatten(0, taken.places_PC.shape)
            counts = taken.counts_PC.view(*taken.counts_PC.shape, *[1] * (grad.dim() - 1))
            summed = (copies.float() * counts).sum(1)
            out.index_copy_(0, taken.repeated_P, summed.to(grad.dtype))
        return out, None


@dataclass(frozen=True)
class SharedPrompts:
    """Sequences of which some begin with the same prompt, whose tokens are computed once.

    Attributes:
        expanded: where the tokens of the whole sequences, one after another, are among the T that are computed.
        owners: the place of each of the T in the whole sequences.
        copies_T: how many tokens of the whole sequences each one is, fp32 [T].
    """

    expanded: TakenRows
    owners: TakenRows
    copies_T: Tensor

    def to(self, device: torch.device) -> SharedPrompts:
        return SharedPrompts(self.expanded.to(device), self.owners.to(device), async_h2d(self.copies_T, device))
