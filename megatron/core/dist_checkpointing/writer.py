"""Writes one checkpoint: each rank its files, then one rank completes it; files report who is done, not collectives."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from hf_formats.files import sync_path, try_remove, write_bytes
from hf_formats.listed_pickle import Names, load_listed
from megatron.core.dist_checkpointing.common import COMMON
from megatron.core.dist_checkpointing.manifest import (
    FileRecord,
    Manifest,
    file_problems,
    is_complete,
    record_file,
    write_json,
    write_manifest,
)
from megatron.core.dist_checkpointing.saved_tensors import CHECKPOINT_NAMES
from megatron.core.parallel_layout import ParallelLayout

logger = logging.getLogger(__name__)

_PASSING = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN}  # of a network file system that comes back
_REPLACED = ".replaced"
_RECORD_NAMES: Names = CHECKPOINT_NAMES | {(one.__module__, one.__name__): one for one in (FileRecord, WriteResult)}


@dataclass(frozen=True)
class Completion:
    """What the completing rank adds.

    latest: a file and the text to write to it, which names this checkpoint, when the checkpoint is complete.
    """

    layout: ParallelLayout
    metadata: Metadata
    common: dict[str, Any]
    latest: tuple[str, str] | None
    stall_timeout_s: float


@dataclass(frozen=True)
class RankJob:
    """One rank's part of one checkpoint. plan: what it writes, in the order of the tensors of the job."""

    partial: Path
    final: Path
    rank: int
    plan: SavePlan
    completion: Completion | None


class _TensorPlanner(dcp.DefaultSavePlanner):
    """Resolves the items of a plan to the tensors that they were made from."""

    def __init__(self, plan: SavePlan, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = {item.index: tensor for item, tensor in zip(plan.items, tensors, strict=True)}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


def write_rank(job: RankJob, tensors: Sequence[Tensor], copy_ahead_bytes: int = 10_000_000) -> None:
    """Write and sync this rank's files, then its record; ``OSError`` when they cannot be written."""
    writer = dcp.FileSystemWriter(job.partial, per_thread_copy_ahead=copy_ahead_bytes)
    plan = writer.prepare_global_plan([SavePlan([])] * job.rank + [job.plan])[job.rank]
    try:
        results = writer.write_data(plan, _TensorPlanner(plan, tensors)).wait()
    except RuntimeError as error:  # torch's stream writer fails over what an OSError left behind
        raise OSError(f"{job.partial}: {_system_error(error) or error}") from error
    names = sorted({result.storage_data.relative_path for result in results})
    files = {name: record_file(job.partial / name) for name in names}  # OSError where another process removed one
    write_bytes(_done(job.partial, job.rank), pickle.dumps((files, results)))


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError while whose handling ``error`` was raised; None when there is none."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def report_failure(job: RankJob, text: str) -> None:
    """Write a file that makes the completing rank stop waiting."""
    try:
        write_bytes(job.partial / f"rank-{job.rank}.failed", text.encode())
    except OSError as error:  # the directory was removed, so no rank waits
        logger.warning("rank %d: %s (%s)", job.rank, text, error)


def complete(job: RankJob) -> None:
    """Wait for all ranks' records, then rename the checkpoint to its final name and name it the latest.

    Consumes the records and waits for the missing ones; unblocked by these, by a rank's failure, or when nothing in
    the directory has changed for ``stall_timeout_s`` (``OSError`` in both cases, and the directory is removed).
    """
    completion = job.completion
    assert completion is not None
    try:
        _wait_for_records(job.partial, completion.layout.world_size, completion.stall_timeout_s)
        _finish(job.partial, completion)
    except OSError:
        shutil.rmtree(job.partial, ignore_errors=True)
        raise
    _publish(job.partial, job.final)
    if completion.latest is not None:
        path, text = completion.latest
        write_bytes(Path(path), text.encode())
    logger.info("checkpoint %s is complete", job.final)


def _done(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank}.done"


def _wait_for_records(partial: Path, world_size: int, stall_timeout_s: float) -> None:
    seen, changed_at, pause_s = dict[str, int](), time.monotonic(), 0.01
    missing, problem = list(range(world_size)), ""
    while True:
        try:
            missing = [rank for rank in range(world_size) if not _done(partial, rank).exists()]
            if not missing:
                return
            failed = sorted(partial.glob("rank-*.failed"))
            if failed:
                raise OSError("; ".join(f"{path.stem}: {path.read_text()}" for path in failed))
            now, problem = _sizes(partial), ""
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            now, problem = seen, f"; {error}"
        if now != seen:
            seen, changed_at = now, time.monotonic()
        elif time.monotonic() - changed_at > stall_timeout_s:
            raise OSError(f"ranks {missing[:8]} wrote nothing to {partial} for {stall_timeout_s:g} s{problem}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _sizes(partial: Path) -> dict[str, int]:
    """Name -> bytes of what the other ranks write right now: a name may be gone, renamed, before it is looked at."""
    sizes = {}
    for path in partial.iterdir():
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes


def _finish(partial: Path, completion: Completion) -> None:
    files: dict[str, FileRecord] = {}
    results = []
    for rank in range(completion.layout.world_size):
        own_files, own_results = load_listed(
            io.BytesIO(_done(partial, rank).read_bytes()), _RECORD_NAMES, "a rank's record"
        )
        files |= own_files
        results.append(own_results)
    dcp.FileSystemWriter(partial).finish(replace(completion.metadata), results)
    write_json(partial / COMMON, completion.common)
    files |= {name: record_file(partial / name) for name in (".metadata", COMMON)}
    manifest = Manifest(completion.layout, files)
    problems = file_problems(partial, manifest)
    if problems:
        raise OSError(f"{'; '.join(problems)}; is the directory on a file system that all nodes share?")
    for rank in range(completion.layout.world_size):
        try_remove(_done(partial, rank))
    write_manifest(partial, manifest)


def _publish(partial: Path, final: Path) -> None:
    """Rename ``partial`` to ``final``; an existing directory of that name is renamed first and removed afterwards.

    ``restore_interrupted`` repairs what a kill between the two leaves; a run that resumes may do so at any moment.
    """
    replaced = partial.with_name(f"{partial.name}{_REPLACED}")
    while partial.exists():
        with suppress(FileNotFoundError):
            os.rename(final, replaced)
        try:
            os.rename(partial, final)
        except OSError:
            if not final.exists():
                raise
            # The writer of an earlier run has just published the same step, or another run has restored this one.
            try_remove(replaced)
    sync_path(final.parent)
    try_remove(replaced)


def remove_partials(final: Path) -> None:
    """Remove what interrupted saves of this checkpoint left; a writer that is still at work on one fails.

    Each is renamed first: else what a writer adds while files are removed would keep its directory, and it would
    publish what is left. What cannot be removed stays, and is no reason to end a run.
    """
    for left in final.parent.glob(f".{final.name}.*.partial*"):
        with suppress(OSError):
            os.rename(left, left.with_name(left.name.replace(".partial", ".removed")))
    for removed in final.parent.glob(f".{final.name}.*.removed*"):
        try_remove(removed)


def restore_interrupted(final: Path) -> None:
    """Give a checkpoint its name where a kill came between the two renames of ``_publish``; else do nothing.

    Both copies are then whole under other names, and the new one is taken.
    """
    if final.exists():
        return
    left = sorted(final.parent.glob(f".{final.name}.*.partial*"), key=lambda path: path.name.endswith(_REPLACED))
    if not any(path.name.endswith(_REPLACED) for path in left):
        return
    for path in left:
        if is_complete(path):
            try:
                os.rename(path, final)
            except OSError as error:  # another process has restored it, or this one may not write there
                logger.warning("%s could not be renamed to %s: %s", path, final, error)
            else:
                logger.warning("%s: a save was killed while it replaced it; it is restored from %s", final, path.name)
            return
