"""Checkpoints in MindSpeed-LLM's file layout (iter_0000001/mp_rank_*): read by any layout."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig, parse_hf_config
from hf_formats.file_region import FileReader, FileRegion
from hf_formats.files import write_json
from hf_formats.problems import raise_problems, shown_names
from hf_formats.ranges import Ranges, relative
from megatron.core.parallel_layout import ParallelLayout, RankCoords
from mindspeed_llm.saved_tensor import saved_content
from mindspeed_llm.weight_plan import NAMINGS, Naming, Shard, TensorPlan, local_plan
from mindspeed_llm.weight_source import PlannedCheckpoint, hf_view, read_region

LAYOUT_NAME = "layout.json"
LATEST_NAME = "latest_checkpointed_iteration.txt"
ITERATION = 1


def shard_layout(
    tensor_parallel: int,
    pipeline_parallel: int,
    expert_parallel: int,
    *,
    tp_extend_ep: bool,
    num_layer_list: tuple[int, ...] | None = None,
    virtual_pipeline: int = 1,
    noop_layers: tuple[int, ...] = (),
) -> ParallelLayout:
    """The layout whose ranks are the files of a sharded checkpoint: one per (tp, pp, ep).

    With ``tp_extend_ep`` experts stay whole and go to slot ep * TP + tp of TP * EP; otherwise they are divided over EP
    and each expert's width over TP.
    """
    return ParallelLayout(
        world_size=tensor_parallel * pipeline_parallel * expert_parallel,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        expert_model_parallel_size=expert_parallel * (tensor_parallel if tp_extend_ep else 1),
        expert_tensor_parallel_size=1 if tp_extend_ep else tensor_parallel,
        num_layer_list=num_layer_list,
        virtual_pipeline_model_parallel_size=virtual_pipeline,
        noop_layers=noop_layers,
    )


def rank_file(layout: ParallelLayout, coords: RankCoords) -> str:
    """Path of a rank's file inside the checkpoint, ``iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``."""
    name = f"mp_rank_{coords.tp:02d}"
    if layout.pipeline_model_parallel_size > 1:
        name += f"_{coords.pp:03d}"
    if layout.data_parallel_size > 1:  # in these files data parallelism is there for the experts only
        name += f"_{coords.dp:03d}"
    return f"iter_{ITERATION:07d}/{name}/model_optim_rng.pt"


class ShardedCheckpoint(PlannedCheckpoint):
    """A sharded checkpoint as a source of HF tensors: any part, assembled from the files whose shards overlap it.

    ``layout`` and ``hf`` come from the manifest beside the files; a checkpoint without one (made by MindSpeed-LLM
    itself) needs them, and ``naming``, as arguments. Missing or truncated files are one ValueError at construction.
    Only what is asked for is read, and mapped just as long as its tensor lives.
    """

    def __init__(
        self,
        path: str | Path,
        hf: HFModelConfig | None = None,
        layout: ParallelLayout | None = None,
        naming: Naming = "mindspeed_llm",
    ) -> None:
        path = Path(path)
        manifest = read_layout(path)
        if manifest is not None:
            hf, layout, naming = _from_manifest(path, manifest)
        if hf is None or layout is None:
            raise ValueError(f"{path} has no {LAYOUT_NAME}; say with which layout and config.json it was made")
        super().__init__(path, hf, layout, naming)
        self._check_files(manifest["files"] if manifest is not None else {})
        self._opened: dict[int, dict[str, FileRegion]] = {}

    def __reduce__(self) -> tuple[type[ShardedCheckpoint], tuple[object, ...]]:
        return ShardedCheckpoint, (self.path, self.hf, self.layout, self.naming)

    def dtype(self, hf_name: str) -> torch.dtype:
        shard = self._shards[hf_name][0]
        return self._local(shard).dtype

    def _read_shard(self, shard: Shard, ranges: Ranges) -> Tensor:
        return _read_part(self._local(shard), shard, ranges)

    def describe(self) -> str:
        """Which form it is, and what is in it, for a log."""
        return f"mp_rank shards for {self.layout} ({self.naming})"

    def files(self) -> list[Path]:
        """Every file that decides what this source holds."""
        names = [rank_file(self.layout, self.layout.coords(rank)) for rank in range(self.layout.world_size)]
        manifest = self.path / LAYOUT_NAME
        return [self.path / name for name in names] + ([manifest] if manifest.exists() else [])

    def _local(self, shard: Shard) -> FileRegion:
        if shard.rank not in self._opened:
            self._opened[shard.rank] = self._open(shard.rank)
        return self._opened[shard.rank][shard.param]

    def _open(self, rank: int) -> dict[str, FileRegion]:
        """Tensors of one file in the shapes of the plan, which must be what the file holds."""
        file = self.path / rank_file(self.layout, self.layout.coords(rank))
        stored = torch_file_regions(file)
        problems, regions = [], {}
        for tensor in local_plan(self.hf, self.layout, rank, self.naming):
            model, name = place_in_file(tensor)
            found = stored.get((model, name))
            if found is None:
                problems.append(f"{name} of {model!r} is missing")
            elif found.shape not in (tensor.shape, tensor.file_shape):
                expected = tensor.file_shape or tensor.shape
                problems.append(f"{name} has shape {found.shape}; the layout makes it {expected}")
            else:
                regions[tensor.name] = replace(found, shape=tensor.shape)
        raise_problems(str(file), problems, "Give the layout and config.json with which it was made.")
        return regions

    def _check_files(self, sizes: dict[str, int]) -> None:
        problems = []
        for rank in range(self.layout.world_size):
            name = rank_file(self.layout, self.layout.coords(rank))
            file = self.path / name
            if not file.is_file():
                problems.append(f"{name} is missing, with {self._shown(rank)}")
            elif name in sizes and file.stat().st_size != sizes[name]:
                size = file.stat().st_size
                problems.append(
                    f"{name} has {size} bytes; it was written with {sizes[name]}; it holds {self._shown(rank)}"
                )
            elif not zipfile.is_zipfile(file):
                problems.append(f"{name} is truncated or no torch file; it should hold {self._shown(rank)}")
        raise_problems(f"sharded checkpoint {self.path}", problems, "Make it again with convert_ckpt_deepseek3.")

    def _shown(self, rank: int) -> str:
        plan = local_plan(self.hf, self.layout, rank, self.naming)
        return shown_names([tensor.name for tensor in plan])


def torch_file_regions(file: Path) -> dict[tuple[str, str], FileRegion]:
    """(model, name) -> where the tensor lies, for every tensor of a file of ``torch.save``; reads no data."""
    try:
        stored = saved_content(FileReader(), "the content", file, (0, file.stat().st_size))
    except ValueError as error:  # MindSpeed-LLM's own files hold its arguments and more beside the tensors
        raise ValueError(
            f"{file} is no file of plain tensors; convert from the Hugging Face checkpoint with "
            "convert_ckpt_deepseek3 instead"
        ) from error
    regions = {}
    for model, content in stored.items():
        for name, region in content.items() if isinstance(content, dict) else ():
            if isinstance(region, str):
                raise ValueError(f"{file}: {name} is not stored as plain rows; save it with torch.save as contiguous")
            if isinstance(region, FileRegion):
                regions[model, name] = region
    return regions


def write_layout(
    directory: Path,
    naming: Naming,
    layout: ParallelLayout,
    hf_config: Mapping[str, Any],
    mtp_num_layers: int,
    sizes: Mapping[str, int],
) -> None:
    """layout.json, for the way back: how the model of ``hf_config`` is cut, and file -> bytes."""
    content = {"version": 1, "naming": naming, "layout": asdict(layout), "hf_config": dict(hf_config)}
    write_json(directory / LAYOUT_NAME, {**content, "mtp_num_layers": mtp_num_layers, "files": dict(sizes)})


def read_layout(path: Path) -> dict[str, Any] | None:
    """The layout manifest of a sharded checkpoint, None when it has none."""
    file = path / LAYOUT_NAME
    if not file.exists():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    missing = [key for key in ("naming", "layout", "hf_config", "files") if key not in manifest]
    if missing or manifest["naming"] not in NAMINGS:
        raise ValueError(f"{file} is no layout manifest (missing: {', '.join(missing) or 'a known naming'})")
    return manifest


def _from_manifest(path: Path, manifest: dict[str, Any]) -> tuple[HFModelConfig, ParallelLayout, Naming]:
    hf = parse_hf_config(manifest["hf_config"], source=f"{path / LAYOUT_NAME}: hf_config")
    hf = hf.with_mtp(manifest.get("mtp_num_layers", 0))
    return hf, ParallelLayout.from_json(manifest["layout"]), manifest["naming"]


def place_in_file(tensor: TensorPlan) -> tuple[str, str]:
    """The file's key of the chunk that a tensor belongs to, and its name inside."""
    match = re.match(r"chunks\.(\d+)\.(.+)", tensor.name)
    return (f"model{match[1]}", match[2]) if match else ("model", tensor.name)


def _read_part(region: FileRegion, shard: Shard, wanted: Ranges) -> Tensor:
    """``wanted``, a part of ``shard.ranges``, out of the local tensor at ``region``; maps no rows beside it."""
    rows, *others = shard.local_ranges
    if len(shard.local_ranges) == len(shard.ranges):
        start = rows[0] + wanted[0][0] - shard.ranges[0][0]
        part = replace(shard, ranges=(wanted[0], *shard.ranges[1:]))
        rows = (start, start + wanted[0][1] - wanted[0][0])
    else:
        part = shard
    local = read_region(region, (rows, *others))
    whole = replace(part, local_ranges=tuple((0, size) for size in local.shape))
    return hf_view(local, whole)[relative(wanted, part.ranges)]
