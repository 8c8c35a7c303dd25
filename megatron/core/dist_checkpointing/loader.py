"""Loads a checkpoint into the layout of this job."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hf_formats.finite import require_finite
from megatron.core.dist_checkpointing.common import read_common
from megatron.core.dist_checkpointing.manifest import Manifest, file_problems, read_manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.random_states import get_random_states, seed_from_states, set_random_states
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.dist_checkpointing.saved_tensors import read_metadata
from megatron.core.dist_checkpointing.sharded_state import random_state_shards, training_shards
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups

logger = logging.getLogger(__name__)

_SHOWN = 8


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    groups: ProcessGroups | None = None,
    *,
    random_states: bool = True,
    verify_digests: bool = False,
) -> dict[str, Any]:
    """Restore everything a save wrote, in place, and return its ``extra``; collective over the world.

    Any layout can load what any other saved. In the layout that saved it all random generators continue, bit for bit;
    in another layout each rank's generators are seeded from the saved states of rank 0 and its own rank, so that two
    loads give the same states. Optimizer and scheduler may be None, ``random_states`` False: that state is not read.
    Raises ``ValueError`` when the checkpoint is incomplete (every damaged file is named) or of another model, before
    anything is overwritten, and when a value in it is NaN or infinite.
    """
    source, ranks = Path(directory), Ranks(groups)
    manifest = read_manifest(source)
    problems = verify_checkpoint(source, groups) if verify_digests else file_problems(source, manifest)
    if problems:
        raise ValueError(f"checkpoint {source} cannot be loaded: " + "; ".join(problems))
    common = read_common(source)
    shards = training_shards(model, optimizer, ranks)
    reader = dcp.FileSystemReader(source)
    metadata = read_metadata(source)
    found = ranks.together("compare", lambda: (_problems(shards, metadata), {s.key for s in shards}))
    _check(source, [problem for own, _ in found for problem in own])
    _warn_of_unread(source, metadata, {key for _, keys in found for key in keys}, ranks)
    read = ranks.together(f"read {source}", lambda: _read(reader, metadata, shards))
    _check(source, [problem for own in read for problem in own], "cannot be used")
    if random_states:
        _restore_random(reader, metadata, manifest, ranks, next(model.parameters()).device)
    if optimizer is not None:
        tensors = {key: value for key, value in optimizer.state_dict().items() if isinstance(value, Tensor)}
        optimizer.load_state_dict(tensors | common["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(common["scheduler"])
    return common["extra"]


def verify_checkpoint(directory: str | os.PathLike[str], groups: ProcessGroups | None = None) -> list[str]:
    """Every file that is missing or differs from its digest, on all ranks; collective, each rank reads its share."""
    source, ranks = Path(directory), Ranks(groups)
    try:
        manifest = read_manifest(source)
    except ValueError as error:
        return [str(error)]
    names = sorted(manifest.files)[ranks.rank :: ranks.layout.world_size]
    share = Manifest(manifest.layout, {name: manifest.files[name] for name in names})
    found = ranks.together(f"verify {source}", lambda: file_problems(source, share, verify_digests=True))
    return [problem for own in found for problem in own]


class _ShardPlanner(dcp.DefaultLoadPlanner):
    """Requests the parts of saved chunks that overlap ``shards`` and writes them there."""

    def __init__(self, shards: Sequence[ShardedTensor], metadata: Metadata) -> None:
        super().__init__()
        self.problems: list[str] = []  # values that are not finite
        self._saved, self._files = metadata.state_dict_metadata, metadata.storage_data
        self._shards: dict[str, dict[torch.Size, list[ShardedTensor]]] = {}
        for shard in shards:
            self._shards.setdefault(shard.key, {}).setdefault(torch.Size(shard.offsets), []).append(shard)

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, by_offsets in self._shards.items():
            saved = self._saved[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = [ChunkStorageMetadata(at, torch.Size(shards[0].sizes)) for at, shards in by_offsets.items()]
            items += create_read_items_for_chunk_list(key, saved, wanted)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._views(read_item)[0]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Copy the values to the other shards of the same elements on this rank (a shared embedding's copy)."""
        try:
            file = self._files[read_item.storage_index].relative_path
            require_finite(read_item.dest_index.fqn, tensor, file)
        except ValueError as error:  # raised on all ranks when all have read
            self.problems.append(str(error))
        for view in self._views(read_item)[1:]:
            view.copy_(tensor)

    def _views(self, item: ReadItem) -> list[Tensor]:
        assert item.dest_index.offset is not None
        views = [shard.tensor for shard in self._shards[item.dest_index.fqn][item.dest_index.offset]]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            views = [view.narrow(dim, start, length) for view in views]
        return views


def _read(reader: dcp.FileSystemReader, metadata: Metadata, shards: Sequence[ShardedTensor]) -> list[str]:
    """Fill ``shards``; returns what is not finite."""
    planner = _ShardPlanner(shards, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    num_read = sum(prod(item.lengths) for item in plan.items)
    num_wanted = sum(prod(shard.sizes) for shard in {(s.key, s.offsets): s for s in shards}.values())
    assert num_read == num_wanted, f"{num_read} elements to read, {num_wanted} wanted"
    with torch.no_grad():
        reader.read_data(plan, planner).wait()
    return planner.problems


def _problems(shards: Sequence[ShardedTensor], metadata: Metadata) -> list[str]:
    """The differences between this rank's tensors and the saved ones."""
    found: dict[str, str] = {}
    for shard in shards:
        key, saved = shard.key, metadata.state_dict_metadata.get(shard.key)
        if not isinstance(saved, TensorStorageMetadata):
            found[key] = f"{key} is not in it"
        elif tuple(saved.size) != shard.global_shape:
            found[key] = f"{key} is {tuple(saved.size)} in it, {shard.global_shape} in this job"
        elif saved.properties.dtype != shard.tensor.dtype:
            found[key] = f"{key} is {saved.properties.dtype} in it, {shard.tensor.dtype} in this job"
    return list(found.values())


def _check(source: Path, problems: Sequence[str], what: str = "is of another model") -> None:
    distinct = list(dict.fromkeys(problems))
    if distinct:
        more = f"; and {len(distinct) - _SHOWN} more" if len(distinct) > _SHOWN else ""
        raise ValueError(f"checkpoint {source} {what}: " + "; ".join(distinct[:_SHOWN]) + more)


def _warn_of_unread(source: Path, metadata: Metadata, wanted: set[str], ranks: Ranks) -> None:
    """Warn once that saved tensors are not read: a model without MTP layer may load a checkpoint that has one."""
    unread = [key for key in metadata.state_dict_metadata if key.startswith("model.") and key not in wanted]
    if unread and ranks.rank == 0:
        logger.warning("%s: %d tensors are not in this model, %s first", source, len(unread), unread[0])


def _restore_random(
    reader: dcp.FileSystemReader, metadata: Metadata, manifest: Manifest, ranks: Ranks, device: torch.device
) -> None:
    states = get_random_states(device)
    shards = random_state_shards(states, ranks.rank)
    if manifest.layout == ranks.layout and not _problems(shards, metadata):
        _read(reader, metadata, shards)
        set_random_states(states, device)
        return
    host_states = {name: state for name, state in states.items() if name != "device"}
    _read(reader, metadata, random_state_shards(host_states, 0))
    seed_from_states(host_states, ranks.rank)
