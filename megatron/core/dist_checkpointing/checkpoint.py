"""Saves and loads model, optimizer, scheduler and random states of all ranks with torch.distributed.checkpoint."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core.dist_checkpointing.manifest import (
    FileRecord,
    Manifest,
    file_problems,
    read_manifest,
    record_file,
    sync_directory,
    write_json,
    write_manifest,
)
from megatron.core.dist_checkpointing.random_states import get_random_states, set_random_states
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from megatron.core.parallel_state import ProcessGroups

logger = logging.getLogger(__name__)

_COMMON = "common.json"
Result = TypeVar("Result")


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    extra: Mapping[str, Any],
    groups: ProcessGroups | None = None,
) -> None:
    """Write a checkpoint; collective over the world, on a file system that all ranks share.

    ``directory`` appears under its name only when everything is on disk; one that is there already is replaced.
    ``extra`` is anything JSON can hold; rank 0's is saved. ``groups`` None means one process without
    torch.distributed. Parameters must be on the device; the optimizer's state may be offloaded. Raises ``OSError``
    on every rank when any rank cannot write.
    """
    final = Path(directory)
    partial = final.with_name(f".{final.name}.partial")
    ranks = _Ranks(groups)
    ranks.together(f"prepare {partial}", lambda: _make_empty(partial) if ranks.rank == 0 else None)
    try:
        dcp.save(_tensors_to_save(model, optimizer, ranks), storage_writer=dcp.FileSystemWriter(partial))
    except CheckpointException as error:
        causes = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
        raise OSError(f"checkpoint {final} could not be written: {causes}") from None
    common = _common_state(optimizer, scheduler, extra)
    records = ranks.together(f"finish {partial}", lambda: _finish_own_files(partial, ranks.rank, common))
    manifest = Manifest(ranks.layout, {name: record for part in records for name, record in part.items()})
    ranks.together(f"complete {final}", lambda: _publish(partial, final, manifest) if ranks.rank == 0 else None)


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    groups: ProcessGroups | None = None,
    *,
    verify_digests: bool = False,
) -> dict[str, Any]:
    """Restore everything ``save_checkpoint`` saved, in place, and return its ``extra``; collective over the world.

    Optimizer, scheduler or both may be None: their part is not read. Raises ``ValueError`` when the checkpoint is
    not complete (every damaged file is named), was written at another layout, or by another model.
    """
    source = Path(directory)
    ranks = _Ranks(groups)
    manifest = read_manifest(source)
    problems = file_problems(source, manifest, verify_digests)
    if problems:
        raise ValueError(f"checkpoint {source} cannot be loaded: " + "; ".join(problems))
    if manifest.layout != ranks.layout:
        raise ValueError(
            f"checkpoint {source} was saved at {_describe(manifest.layout)}, this job runs at "
            f"{_describe(ranks.layout)}; start the job with the checkpoint's layout"
        )
    common = json.loads((source / _COMMON).read_text())
    device = next(model.parameters()).device
    random_states = get_random_states(device)
    tensors = _model_tensors(model, ranks, only_owned=False) | _optimizer_tensors(optimizer, ranks)
    tensors |= {f"rng.rank{ranks.rank}.{key}": value for key, value in random_states.items()}
    reader = dcp.FileSystemReader(source)
    _check_tensors(source, tensors, reader.read_metadata().state_dict_metadata)
    dcp.load(tensors, storage_reader=reader)
    set_random_states(random_states, device)
    if optimizer is not None:
        own_tensors = {key: value for key, value in optimizer.state_dict().items() if isinstance(value, torch.Tensor)}
        optimizer.load_state_dict(own_tensors | common["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(common["scheduler"])
    return common["extra"]


class _Ranks:
    """Layout and coordinates of this rank, and how the ranks agree; one process needs no torch.distributed."""

    def __init__(self, groups: ProcessGroups | None) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        assert groups is not None or is_alone, "checkpoints are collective over the world: pass the process groups"
        self.groups = groups
        self.layout = ParallelLayout() if groups is None else groups.layout
        self.rank = 0 if groups is None else groups.rank
        self.coords: RankCoords = self.layout.coords(self.rank)

    def together(self, what: str, action: Callable[[], Result]) -> list[Result]:
        """Run ``action`` on every rank; all results in rank order, or ``OSError`` on all ranks when one failed.

        Every rank waits for all others here, so what one rank did before is done when any rank goes on.
        """
        result, failure = None, None
        try:
            result = action()
        except OSError as error:
            failure = f"rank {self.rank}: {error}"
        outcomes = [(result, failure)]
        if self.groups is not None and self.layout.world_size > 1:
            outcomes = [(None, None)] * self.layout.world_size
            dist.all_gather_object(outcomes, (result, failure), group=self.groups.world)
        failures = [text for _, text in outcomes if text is not None]
        if failures:
            raise OSError(f"could not {what}: " + "; ".join(failures))
        return [result for result, _ in outcomes]  # type: ignore[misc]


def _tensors_to_save(
    model: nn.Module, optimizer: DistributedOptimizer | None, ranks: _Ranks
) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    random_states = {f"rng.rank{ranks.rank}.{key}": value for key, value in get_random_states(device).items()}
    return _model_tensors(model, ranks, only_owned=True) | _optimizer_tensors(optimizer, ranks) | random_states


def _model_tensors(model: nn.Module, ranks: _Ranks, only_owned: bool) -> dict[str, torch.Tensor]:
    """The model's tensors under keys that say where they belong; replicas share a key, and the first one owns it."""
    at = ranks.coords
    experts = {name for name, param in model.named_parameters() if not getattr(param, "allreduce", True)}
    experts |= {name.removeprefix("module.") for name in experts}  # names of a DDP wrapper's parameters
    tensors = {}
    for name, tensor in model.state_dict().items():
        assert tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0, f"{name} is offloaded"
        is_expert = name in experts
        if only_owned and (at.edp if is_expert else at.dp) != 0:
            continue
        place = f"ep{at.ep}" if is_expert else f"tp{at.tp}"
        tensors[f"model.pp{at.pp}.{place}.{name}"] = tensor
    return tensors


def _optimizer_tensors(optimizer: DistributedOptimizer | None, ranks: _Ranks) -> dict[str, torch.Tensor]:
    if optimizer is None:
        return {}
    state = optimizer.state_dict().items()
    return {f"optimizer.rank{ranks.rank}.{key}": value for key, value in state if isinstance(value, torch.Tensor)}


def _common_state(
    optimizer: DistributedOptimizer | None, scheduler: OptimizerParamScheduler | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    scalars = {} if optimizer is None else optimizer.state_dict()
    return {
        "optimizer": {key: value for key, value in scalars.items() if not isinstance(value, torch.Tensor)},
        "scheduler": {} if scheduler is None else scheduler.state_dict(),
        "extra": dict(extra),
    }


def _finish_own_files(partial: Path, rank: int, common: dict[str, Any]) -> dict[str, FileRecord]:
    """Records of the files this rank wrote (torch names them ``__<rank>_<index>.distcp``); rank 0 adds the scalars."""
    own = sorted(partial.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        write_json(partial / _COMMON, common)
        own += [partial / ".metadata", partial / _COMMON]
    return {path.name: record_file(path) for path in own}


def _publish(partial: Path, final: Path, manifest: Manifest) -> None:
    problems = file_problems(partial, manifest)
    if problems:
        raise OSError(f"{'; '.join(problems)}; is the directory on a file system that all nodes share?")
    write_manifest(partial, manifest)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(partial, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    logger.info("checkpoint %s: %d files", final, len(manifest.files))


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _check_tensors(source: Path, tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """The model and optimizer of this job against those in the checkpoint, before anything is overwritten."""
    problems = []
    for key, tensor in tensors.items():
        if key not in saved:
            problems.append(f"{key} is not in it")
        elif tuple(saved[key].size) != tuple(tensor.shape):
            problems.append(f"{key} is {tuple(saved[key].size)} in it, {tuple(tensor.shape)} in this job")
        elif saved[key].properties.dtype != tensor.dtype:
            problems.append(f"{key} is {saved[key].properties.dtype} in it, {tensor.dtype} in this job")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"checkpoint {source} is of another model: " + "; ".join(problems[:8]) + more)


def _describe(layout: ParallelLayout) -> str:
    sizes = asdict(layout)
    stages = sizes.pop("num_layer_list")
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return f"({text}, num_layer_list {'even' if stages is None else stages})"
