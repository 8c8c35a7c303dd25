"""What conversion commands read from: an HF directory (plain or FP8) or shards of any layout, checked when opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig, parse_hf_config, read_config_dict
from hf_formats.fp8 import FP8_DTYPE, is_quantized
from hf_formats.ranges import Ranges
from mindspeed_llm.cli_io import hf_files
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, is_dcp, weights_of
from mindspeed_llm.hf_checkpoint import open_hf
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import LAYOUT_NAME, ShardedCheckpoint, read_layout
from mindspeed_llm.weight_source import WeightSource


@dataclass(frozen=True)
class Input:
    """``config`` is config.json as read, ``hf`` the model that is converted, ``files`` what decides the result."""

    source: WeightSource
    config: Mapping[str, Any]
    hf: HFModelConfig
    files: tuple[Path, ...]


@dataclass(frozen=True)
class PlannedWeights:
    """The checkpoint that a config.json describes, as a source without weights: for dry runs."""

    hf: HFModelConfig

    def names(self) -> Collection[str]:
        return hf_tensors(self.hf).keys()

    def dtype(self, hf_name: str) -> torch.dtype:
        if self.hf.quant_method == "fp8" and is_quantized(hf_name):
            return FP8_DTYPE
        found: torch.dtype = getattr(torch, hf_tensors(self.hf)[hf_name][1])
        return found

    def read(self, hf_name: str, ranges: Ranges) -> Tensor:
        raise AssertionError(f"{hf_name} is planned, not stored")


def input_config(path: Path) -> HFModelConfig:
    """The model of the checkpoint at ``path``, MTP modules not counted; reads its config alone."""
    layout = read_layout(path)
    config, source = (read_config_dict(path), "config.json") if layout is None else (layout["hf_config"], LAYOUT_NAME)
    return parse_hf_config(config, source=str(path / source))


def open_input(path: Path, mtp_num_layers: int, dry_run: bool = False, hf_config_dir: Path | None = None) -> Input:
    """The checkpoint at ``path``, all headers and sizes checked; a dry run is content with a config.json alone.

    ``hf_config_dir`` is for training checkpoints, which do not say of which model they are.
    """
    path = weights_of(path)
    if is_dcp(path):
        return open_dcp(path, mtp_num_layers, hf_config_dir)
    if (path / LAYOUT_NAME).exists():
        return _open_shards(path, mtp_num_layers)
    config = read_config_dict(path)
    hf = parse_hf_config(config, source=str(path / "config.json")).with_mtp(mtp_num_layers)
    if dry_run and not any(path.glob("*.safetensors")):
        return Input(PlannedWeights(hf), config, hf, ())
    return Input(open_hf(path, hf), config, hf, tuple(hf_files(path)))


def open_dcp(path: Path, mtp_num_layers: int, hf_config_dir: Path | None) -> Input:
    """A directory of torch.distributed.checkpoint: converted weights, or the model part of a training checkpoint."""
    layout = read_layout(path)
    if layout is None and hf_config_dir is None:
        raise ValueError(f"{path} does not say of which model it is; give --hf-config-dir, where its config.json is")
    config = read_config_dict(hf_config_dir) if hf_config_dir is not None else (layout or {})["hf_config"]
    hf = parse_hf_config(config, source=str(hf_config_dir or path / LAYOUT_NAME)).with_mtp(mtp_num_layers)
    source = DCPCheckpoint(path, hf)
    return Input(source, config, hf, tuple(source.files()))


def _open_shards(path: Path, mtp_num_layers: int) -> Input:
    source = ShardedCheckpoint(path)
    layout = read_layout(path)
    assert layout is not None, "its presence was seen"
    if mtp_num_layers > source.hf.mtp_num_layers:
        raise ValueError(f"{path} holds {source.hf.mtp_num_layers} MTP layers, not {mtp_num_layers}")
    return Input(source, layout["hf_config"], source.hf.with_mtp(mtp_num_layers), tuple(source.files()))
