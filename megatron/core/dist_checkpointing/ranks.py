"""Runs the steps of a save or load on all ranks; a job of one process needs no torch.distributed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import ProcessGroups

Result = TypeVar("Result")

# Errors of disks, devices and damaged files that one rank may raise while the others succeed.
_SHARED_ERRORS = (OSError, RuntimeError, MemoryError, pickle.UnpicklingError)


class Ranks:
    """The layout and this rank; ``together`` runs a step on every rank."""

    def __init__(self, groups: ProcessGroups | None) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        assert groups is not None or is_alone, "checkpoints are collective over the world: pass the process groups"
        self.groups = groups
        self.layout = ParallelLayout() if groups is None else groups.layout
        self.rank = 0 if groups is None else groups.rank

    def together(self, what: str, action: Callable[[], Result]) -> list[Result]:
        """Run ``action`` on every rank; all results in rank order, or ``OSError`` on all ranks when it failed on one.

        Every rank waits here for all others, so what any rank did before is finished when a rank continues.
        """
        result, failure = None, None
        try:
            result = action()
        except _SHARED_ERRORS as error:
            failure = f"rank {self.rank}: {error if isinstance(error, OSError) else repr(error)}"
        outcomes = [(result, failure)]
        if self.groups is not None and self.layout.world_size > 1:
            outcomes = [(None, None)] * self.layout.world_size
            dist.all_gather_object(outcomes, (result, failure), group=self.groups.world)
        failures = [text for _, text in outcomes if text is not None]
        if failures:
            raise OSError(f"could not {what}: " + "; ".join(failures))
        return [result for result, _ in outcomes]  # type: ignore[misc]
