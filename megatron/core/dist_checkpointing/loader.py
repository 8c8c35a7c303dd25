"""Loads a checkpoint into whatever layout this job has."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.manifest import Manifest, file_problems, read_manifest
from megatron.core.dist_checkpointing.mapping import Piece
from megatron.core.dist_checkpointing.random_states import get_random_states, seed_from_states, set_random_states
from megatron.core.dist_checkpointing.ranks import Ranks
from megatron.core.dist_checkpointing.sharded_state import (
    model_pieces,
    optimizer_pieces,
    placements,
    random_pieces,
    unwrapped,
)
from megatron.core.dist_checkpointing.writing import COMMON
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
    verify_digests: bool = False,
) -> dict[str, Any]:
    """Restore everything a save wrote, in place, and return its ``extra``; collective over the world.

    Any layout loads what any other saved. In the layout that saved it all random generators continue, bit for bit; in
    another one each rank's are seeded from the saved states of rank 0 and its own number, so that two loads in one
    layout do the same. Optimizer, scheduler or both may be None: their part is not read. Raises ``ValueError`` when the
    checkpoint is not complete (every damaged file is named) or of another model, before anything is overwritten.
    """
    source, ranks = Path(directory), Ranks(groups)
    manifest = read_manifest(source)
    problems = verify_checkpoint(source, groups) if verify_digests else file_problems(source, manifest)
    if problems:
        raise ValueError(f"checkpoint {source} cannot be loaded: " + "; ".join(problems))
    common = json.loads((source / COMMON).read_text())
    module = unwrapped(model)
    placed = placements(module, ranks.layout, ranks.rank)
    pieces = model_pieces(module, placed)
    if optimizer is not None:
        pieces += optimizer_pieces(optimizer, placed)
    reader = dcp.FileSystemReader(source)
    metadata = reader.read_metadata()
    found = ranks.together("compare", lambda: (_problems(pieces, metadata), {p.key for p in pieces}))
    _check(source, [problem for own, _ in found for problem in own])
    _tell_unread(source, metadata, {key for _, keys in found for key in keys}, ranks)
    ranks.together(f"read {source}", lambda: _read(reader, metadata, pieces))
    _restore_random(reader, metadata, manifest, ranks, next(model.parameters()).device)
    if optimizer is not None:
        tensors = {key: value for key, value in optimizer.state_dict().items() if isinstance(value, torch.Tensor)}
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


class _PiecePlanner(LoadPlanner):
    """Asks for the parts of saved chunks that lie in ``pieces`` and puts them there."""

    def __init__(self, pieces: Sequence[Piece], metadata: Metadata) -> None:
        self.metadata = metadata
        self._targets: dict[str, dict[torch.Size, list[Piece]]] = {}
        for piece in pieces:
            self._targets.setdefault(piece.key, {}).setdefault(torch.Size(piece.offsets), []).append(piece)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Everything was given to the constructor."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, targets in self._targets.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            wanted = [ChunkStorageMetadata(at, torch.Size(held[0].sizes)) for at, held in targets.items()]
            items += create_read_items_for_chunk_list(key, saved, wanted)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._views(read_item)[0]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Give a second holder on this rank (a shared embedding's copy) the same values."""
        for view in self._views(read_item)[1:]:
            view.copy_(tensor)

    def _views(self, item: ReadItem) -> list[torch.Tensor]:
        assert item.dest_index.offset is not None
        views = [piece.tensor for piece in self._targets[item.dest_index.fqn][item.dest_index.offset]]
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            views = [view.narrow(dim, start, length) for view in views]
        return views


def _read(reader: dcp.FileSystemReader, metadata: Metadata, pieces: Sequence[Piece]) -> None:
    planner = _PiecePlanner(pieces, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    num_read = sum(prod(item.lengths) for item in plan.items)
    num_wanted = sum(prod(piece.sizes) for piece in {(p.key, p.offsets): p for p in pieces}.values())
    assert num_read == num_wanted, f"{num_read} elements to read, {num_wanted} wanted"
    with torch.no_grad():
        reader.read_data(plan, planner).wait()


def _problems(pieces: Sequence[Piece], metadata: Metadata) -> list[str]:
    """What this rank's tensors and the saved ones disagree in."""
    found: dict[str, str] = {}
    for piece in pieces:
        key, saved = piece.key, metadata.state_dict_metadata.get(piece.key)
        if not isinstance(saved, TensorStorageMetadata):
            found[key] = f"{key} is not in it"
        elif tuple(saved.size) != piece.global_shape:
            found[key] = f"{key} is {tuple(saved.size)} in it, {piece.global_shape} in this job"
        elif saved.properties.dtype != piece.tensor.dtype:
            found[key] = f"{key} is {saved.properties.dtype} in it, {piece.tensor.dtype} in this job"
    return list(found.values())


def _check(source: Path, problems: Sequence[str]) -> None:
    told = list(dict.fromkeys(problems))
    if told:
        more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise ValueError(f"checkpoint {source} is of another model: " + "; ".join(told[:_SHOWN]) + more)


def _tell_unread(source: Path, metadata: Metadata, wanted: set[str], ranks: Ranks) -> None:
    """A model without the MTP layer may load one with it; that something is left out is said once."""
    unread = [key for key in metadata.state_dict_metadata if key.startswith("model.") and key not in wanted]
    if unread and ranks.rank == 0:
        logger.warning("%s: %d tensors are not in this model, %s first", source, len(unread), unread[0])


def _restore_random(
    reader: dcp.FileSystemReader, metadata: Metadata, manifest: Manifest, ranks: Ranks, device: torch.device
) -> None:
    states = get_random_states(device)
    pieces = random_pieces(states, ranks.rank)
    if manifest.layout == ranks.layout and not _problems(pieces, metadata):
        _read(reader, metadata, pieces)
        set_random_states(states, device)
        return
    host_states = {name: state for name, state in states.items() if name != "device"}
    _read(reader, metadata, random_pieces(host_states, 0))
    seed_from_states(host_states, ranks.rank)
