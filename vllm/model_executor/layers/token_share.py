"""The tokens of a replica, shared out among its TP ranks: each takes as many rows, one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator


@dataclass(frozen=True)
class TokenShare:
    """Rank r of G takes the rows r S to (r + 1) S - 1 of [T, H], with zeros after the last token.

    T may be below G S, so the last ranks may have padding only; they take part in the collectives all the same.
    """

    tp: GroupCoordinator
    num_tokens: int  # T
    num_rows: int  # S, T / G or more

    @staticmethod
    def of(tp: GroupCoordinator, num_tokens: int, longest: int) -> TokenShare:
        """The share of this rank, with as many rows as in the replica that has most tokens (`longest`)."""
        return TokenShare(tp, num_tokens, -(-longest // tp.world_size))

    @property
    def tokens(self) -> slice:
        """The tokens of this rank."""
        first = min(self.tp.rank_in_group * self.num_rows, self.num_tokens)
        return slice(first, min(first + self.num_rows, self.num_tokens))

    @property
    def num_active(self) -> int:
        """How many of this rank's rows are tokens."""
        return self.tokens.stop - self.tokens.start

    def own(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [S, H], this rank's rows."""
        return F.pad(x_TH[self.tokens], (0, 0, 0, self.num_rows - self.num_active))

    def sum(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [S, H], this rank's rows of the sum over the TP ranks."""
        missing = self.tp.world_size * self.num_rows - self.num_tokens
        return self.tp.reduce_scatter(F.pad(x_TH, (0, 0, 0, missing)) if missing else x_TH)

    def gather(self, x_SH: Tensor) -> Tensor:
        """[S, H] -> [T, H], the rows of all TP ranks."""
        return self.tp.all_gather(x_SH).flatten(0, 1)[: self.num_tokens]
