"""Saves the checkpoints of one job, one at a time, in the foreground or in the background."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.dist_checkpointing.common import common_state
from megatron.core.dist_checkpointing.random_states import get_random_states
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.dist_checkpointing.save_plan import GlobalPlan, OwnedChunks, make_global_plan, owned_chunks
from megatron.core.dist_checkpointing.sharded_state import random_state_shards, training_shards
from megatron.core.dist_checkpointing.snapshot import Snapshot
from megatron.core.dist_checkpointing.write_process import BackgroundWrite
from megatron.core.dist_checkpointing.writer import (
    Completion,
    RankJob,
    complete,
    remove_partials,
    restore_interrupted,
    write_rank,
)
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups


class CheckpointSaver:
    """Writes checkpoints that any layout can load; keeps the running write, and the plan for the next saves.

    Args:
        groups: None means one process without torch.distributed.
        stall_timeout_s: a save in the background fails when nothing has changed in its directory for so long.
        max_chunk_bytes: larger shards are cut, so that their owners share the writing and another layout reads little
            that it does not need.
    """

    def __init__(
        self, groups: ProcessGroups | None = None, *, stall_timeout_s: float = 1800, max_chunk_bytes: int = 1 << 26
    ) -> None:
        self.ranks = Ranks(groups)
        self.stall_timeout_s = stall_timeout_s
        self.max_chunk_bytes = max_chunk_bytes
        self.snapshot_bytes = 0  # memory of the last save in the background
        self._running: BackgroundWrite | None = None
        self._planned: tuple[OwnedChunks, GlobalPlan] | None = None

    def save(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: DistributedOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        extra: Mapping[str, Any],
        *,
        random_states: bool = True,
        async_save: bool = False,
        latest: tuple[str, str] | None = None,
    ) -> None:
        """Write a checkpoint; collective over the world, on a file system that all ranks share.

        ``directory`` appears under its name only when everything is on disk; an existing one is replaced. ``extra`` is
        anything that JSON can hold, ``latest`` a (file, text) that is written afterwards; both are taken from rank 0.
        Parameters must be on the device; the optimizer's state may be offloaded. ``None`` for optimizer or scheduler
        and ``random_states=False`` leave that state out; ``saved_contents`` reads back what is there.

        With ``async_save`` this returns when the state has been copied to host memory (as many bytes as this rank
        writes); ``check`` and ``wait`` report failures. It first waits for an earlier save that still runs. Without
        ``async_save`` the same steps run here, without the copy. Raises ``OSError`` on every rank when any rank cannot
        write, ``ValueError`` when the ranks' tensors do not fit together.
        """
        self.wait()
        final = Path(directory).absolute()
        shards = training_shards(model, optimizer, self.ranks)
        if random_states:
            shards += random_state_shards(get_random_states(next(model.parameters()).device), self.ranks.rank)
        shards = [part for shard in shards for part in shard.split(self.max_chunk_bytes)]
        owned = owned_chunks(shards)
        is_planned = self._planned is not None and self._planned[0] == owned
        started = self.ranks.together(f"prepare {final}", lambda: (self._new_partial(final), is_planned))
        partial = started[0][0]
        if not all(planned for _, planned in started):
            with _removed_on_failure(partial):
                self._planned = (owned, make_global_plan(self.ranks.together("plan", lambda: owned)))
        assert self._planned is not None
        plan = self._planned[1]
        completion = None
        if self.ranks.rank == 0:
            common = common_state(optimizer, scheduler, extra, random_states)
            completion = Completion(self.ranks.layout, plan.metadata, common, latest, self.stall_timeout_s)
        own = plan.save_plan(self.ranks.rank)
        job = RankJob(partial, final, self.ranks.rank, own, completion)
        by_index = {MetadataIndex(shard.key, shard.offsets): shard.tensor for shard in shards}
        tensors = [by_index[item.index] for item in own.items]
        if async_save:
            self._start(job, tensors)
        else:
            self._write(job, tensors)

    def check(self) -> None:
        """Raise ``OSError`` if this rank's running save has failed; neither waits nor communicates."""
        if self._running is not None and not self._running.is_running:
            self._running.result()

    def wait(self) -> None:
        """Wait until the running save is complete on all ranks; collective. ``OSError`` on all ranks if one failed."""
        if self._running is not None:
            running, self._running = self._running, None
            self.ranks.together("save in the background", running.result)

    @property
    def running(self) -> BackgroundWrite | None:
        """This rank's write since the last ``wait``; it may have finished."""
        return self._running

    def _new_partial(self, final: Path) -> Path:
        """On rank 0 a new empty directory; remove what interrupted saves of this checkpoint left."""
        if self.ranks.rank != 0:
            return final  # unused
        final.parent.mkdir(parents=True, exist_ok=True)
        restore_interrupted(final)
        remove_partials(final)
        partial = final.with_name(f".{final.name}.{uuid.uuid4().hex[:12]}.partial")
        partial.mkdir()
        return partial

    def _write(self, job: RankJob, tensors: list[Tensor]) -> None:
        with _removed_on_failure(job.partial):
            self.ranks.together(f"write checkpoint {job.final}", lambda: write_rank(job, tensors))
        self.ranks.together(f"complete {job.final}", lambda: complete(job) if job.completion else None)

    def _start(self, job: RankJob, tensors: list[Tensor]) -> None:
        snapshots: list[Snapshot] = []
        try:
            with _removed_on_failure(job.partial):
                self.ranks.together("copy the state to host memory", lambda: snapshots.append(Snapshot(tensors, job)))
        except OSError:
            for snapshot in snapshots:
                snapshot.close()
            raise
        self.snapshot_bytes = snapshots[0].num_bytes
        self._running = BackgroundWrite(job, snapshots[0])


@contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    """Remove an unfinished checkpoint when the ranks cannot write it or do not agree on it."""
    try:
        yield
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        raise
