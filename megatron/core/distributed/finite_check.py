"""Finds the parameter whose gradient stopped being finite, and the micro-batch in which it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer

# A backward pass spreads one bad value over all earlier layers, so only the first parameters that it reached are named.
MAX_NAMES = 4


class NonFiniteGradientError(FloatingPointError):
    """Raised when a gradient is NaN or infinite and the config asks to stop; the text names the place and the rank."""


@dataclass(frozen=True)
class NonFiniteGrads:
    """The non-finite gradients of one rank; ``names`` are in the order of the backward pass.

    micro_batch: index of the first one that gave such values, None when it is not known · names: all parameters with
    such values · num_values: how many the first of them has.
    """

    rank: int
    micro_batch: int | None
    names: tuple[str, ...]
    num_values: int

    def __str__(self) -> str:
        where = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        others = f"; then {', '.join(self.names[1:MAX_NAMES])}" if len(self.names) > 1 else ""
        more = f" and {len(self.names) - MAX_NAMES} more" if len(self.names) > MAX_NAMES else ""
        return f"rank {self.rank}{where}: {self.num_values} values of {self.names[0]} are not finite{others}{more}"


class FiniteCheck:
    """Checks the accumulated gradients after each micro-batch: one sum over the flat buffers, one wait of the host.

    Values that are not finite stay so when more is added, so nothing is checked after the first find of a step.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], places: Mapping[str, int], rank: int) -> None:
        self._places = places
        self._rank = rank
        self._buffers = list(buffers)
        self.reset()

    def reset(self) -> None:
        self.found: NonFiniteGrads | None = None
        self._written = {buffer.name: True for buffer in self._buffers}

    def mark_written(self, buffer: ParamAndGradBuffer) -> None:
        """A gradient of ``buffer`` has changed since the last look."""
        self._written[buffer.name] = True

    def look(self, buffers: Iterable[ParamAndGradBuffer], micro_batch: int | None) -> None:
        """Check those of ``buffers`` that were written since the last check; ``micro_batch`` wrote them."""
        written = [buffer for buffer in buffers if self._written[buffer.name]]
        for buffer in written:
            self._written[buffer.name] = False
        if self.found is None:
            self.found = find_non_finite(
                {buffer.name: (buffer, 0, buffer.grads.tensor) for buffer in written},
                self._places,
                self._rank,
                micro_batch,
            )


def find_non_finite(
    grads: Mapping[str, tuple[ParamAndGradBuffer, int, Tensor]],
    places: Mapping[str, int],
    rank: int,
    micro_batch: int | None = None,
) -> NonFiniteGrads | None:
    """Search flat gradients; each is given with its buffer and the buffer's element at which it starts.

    A sum is not finite when any of its terms is not. It may also overflow; the search then finds nothing.
    ``places`` are the parameters' positions in the model, by name.
    """
    if not grads or bool(
        torch.stack([flat.sum(dtype=torch.float32) for _, _, flat in grads.values()]).isfinite().all()
    ):
        return None
    counts: dict[str, int] = {}
    for buffer, first, flat in grads.values():
        for name, (start, end) in buffer.param_ranges.items():
            low, high = max(start - first, 0), min(end - first, flat.numel())
            if low < high and (num_values := int((~flat[low:high].isfinite()).sum())):
                counts[name] = num_values
    if not counts:
        return None
    names = tuple(sorted(counts, key=places.__getitem__, reverse=True))
    return NonFiniteGrads(rank, micro_batch, names, counts[names[0]])
