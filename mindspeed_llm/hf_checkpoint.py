"""Hugging Face checkpoints on disk: checked when opened, read by the slice, written as a stream of tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mindspeed_llm.cli_io import atomic_directory, copy_companions, write_json
from mindspeed_llm.file_slices import FileSlices, Region
from mindspeed_llm.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX
from mindspeed_llm.hf_config import HFModelConfig, read_config_dict, without_quantisation_and_mtp
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.mapped import read_region
from mindspeed_llm.sources import raise_problems, shown_names
from mindspeed_llm.streamed_safetensors import StreamedSafetensors
from mindspeed_llm.weight_plan import Slice

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DEFAULT_SHARD_BYTES = 5_000_000_000
DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


class HFCheckpoint:
    """A directory of safetensors shards; nothing is read before ``read`` asks for it except the shards' headers.

    The constructor checks every shard that the index names: a missing file, a file shorter than its header says, a
    tensor that the index places in a file which does not hold it. One ValueError lists all of them. What is read is
    mapped, and the mapping ends with the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries = _read_entries(self.path)
        self._slices = FileSlices()
        self._mapped_bytes = 0

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the shards; tensors that were read stay valid."""
        self._entries = {}
        self._slices.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that ``read`` has handed out or, to cut columns, read from the shards."""
        return self._mapped_bytes + self._slices.bytes_read

    def describe(self) -> str:
        """Which form it is, and what is in it, for a log."""
        num_fp8 = sum(entry.dtype == FP8_DTYPE for entry in self._entries.values())
        return f"a Hugging Face directory of {len(self._entries)} tensors, {num_fp8} of them in FP8"

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._entries.keys()

    def shape(self, hf_name: str) -> tuple[int, ...]:
        """Full shape of a tensor."""
        return self._entries[hf_name].shape

    def dtype(self, hf_name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        return self._entries[hf_name].dtype

    def read(self, hf_name: str, hf_slice: Slice | None = None) -> torch.Tensor:
        """The slice (default: all) of a tensor in its stored dtype: rows as a view of the file, mapped privately; where
        columns are cut, a copy, for which just the pages that hold them are read."""
        entry = self._entries.get(hf_name)
        if entry is None:
            raise ValueError(f"{self.path} has no tensor {hf_name}")
        if hf_slice is not None and hf_slice[1:] != tuple((0, size) for size in entry.shape[1:]):
            return self._slices.read(hf_name, entry, hf_slice)
        rows = read_region(entry, hf_slice)
        self._mapped_bytes += rows.nbytes
        return rows


def open_hf(path: str | Path, hf: HFModelConfig) -> HFCheckpoint:
    """An HF directory, BF16 or FP8, whose every shard and scale is there and of this model; reads headers only."""
    source = HFCheckpoint(path)
    check_against_config(source, hf)
    _check_scales(source, hf, read_config_dict(path))
    return source


def check_against_config(source: HFCheckpoint, hf: HFModelConfig) -> None:
    """ValueError listing every tensor that the config calls for and the checkpoint lacks, has in another shape, or
    has beyond it. FP8 scales and the MTP layers behind the last decoder layer are not counted as beyond it."""
    expected = hf_tensors(hf)
    problems = []
    for name, (shape, _) in expected.items():
        if name not in source.names():
            problems.append(f"{name} is missing")
        elif source.shape(name) != shape:
            problems.append(f"{name} has shape {source.shape(name)}; config.json makes it {shape}")
    problems.extend(
        f"{name} is not part of the model that config.json describes"
        for name in source.names()
        if name not in expected and not is_mtp_tensor(name, hf) and not name.endswith("_scale_inv")
    )
    raise_problems(f"{source.path}", problems, "Check that config.json belongs to these weights.")


def is_mtp_tensor(hf_name: str, hf: HFModelConfig) -> bool:
    """Whether the tensor belongs to a layer behind the decoder, where DeepSeek publishes multi-token prediction."""
    match = re.match(r"model\.layers\.(\d+)\.", hf_name)
    return match is not None and int(match.group(1)) >= hf.num_hidden_layers


class ShardedWriter:
    """Writes a stream of tensors as ``model-00001-of-0000N.safetensors`` and an index; holds one tensor at a time."""

    def __init__(self, directory: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._open: StreamedSafetensors | None = None
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self.dtypes: dict[torch.dtype, int] = {}

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.__exit__(kind, error, trace)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor, first closing the current shard when it would grow beyond the limit."""
        tensor = tensor.detach().cpu().contiguous()
        shard = self._open
        if shard is not None and (
            shard.num_bytes + tensor.nbytes > self._max_shard_bytes or not shard.has_room(name, tensor)
        ):
            self._cut(shard)
            shard = None
        if shard is None:
            shard = self._open = StreamedSafetensors(self._temporary(len(self._shards)), _DTYPE_NAMES)
        shard.add(name, tensor)
        self._total_bytes += tensor.nbytes
        self.dtypes[tensor.dtype] = self.dtypes.get(tensor.dtype, 0) + tensor.nbytes

    def finish(self) -> None:
        """Close the last shard, give all shards their final names and write the index with ``total_size``."""
        if self._open is not None:
            self._cut(self._open)
        weight_map = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            self._temporary(number).rename(self._directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_json(self._directory / INDEX_NAME, index)

    def _cut(self, shard: StreamedSafetensors) -> None:
        shard.close()
        self._shards.append(shard.names)
        self._open = None

    def _temporary(self, number: int) -> Path:
        return self._directory / f"model-{number + 1:05d}.safetensors.part"


def save_hf_checkpoint(
    tensors: Iterable[tuple[str, torch.Tensor]],
    out_dir: str | Path,
    hf_config_dir: str | Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    is_writer: bool = True,
) -> None:
    """Write ``tensors`` as an HF directory that ``transformers`` loads; it appears whole at ``out_dir`` or not at all.

    config.json is ``hf_config_dir``'s without quantisation, its ``num_nextn_predict_layers`` the MTP modules among
    the tensors, its ``torch_dtype`` their dtype; the
    tokenizer files are copied. When ``tensors`` is collective (``export_weights``) every rank calls this, and those
    with ``is_writer`` False only take part. An existing HF directory at ``out_dir`` is replaced, anything else refused.
    """
    out = Path(out_dir)
    if not is_writer:
        for _ in tensors:
            continue
        return
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / "config.json").exists())):
        raise ValueError(f"{out} exists and is no Hugging Face directory; choose another output path")
    with atomic_directory(out) as building:
        write_hf_files(tensors, building, Path(hf_config_dir), max_shard_bytes)


def write_hf_files(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, hf_config_dir: Path, max_shard_bytes: int
) -> None:
    """Shards, index, config.json and tokenizer files into ``directory``, which exists and is empty."""
    config = without_quantisation_and_mtp(read_config_dict(hf_config_dir))
    with ShardedWriter(directory, max_shard_bytes) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
            config["num_nextn_predict_layers"] += name.endswith(".enorm.weight")  # one in every MTP module
        writer.finish()
    copy_companions(hf_config_dir, directory)
    main_dtype = max(writer.dtypes, key=lambda dtype: writer.dtypes[dtype])
    config.pop("dtype", None)
    config["torch_dtype"] = str(main_dtype).removeprefix("torch.")
    write_json(directory / "config.json", config)


def _check_scales(source: HFCheckpoint, hf: HFModelConfig, config: Mapping[str, Any]) -> None:
    """ValueError listing every FP8 weight without its scales of 128 x 128 blocks; ``config`` is config.json as read."""
    problems = []
    block_size = (config.get("quantization_config") or {}).get("weight_block_size")
    if block_size not in (None, [BLOCK, BLOCK]):
        problems.append(f"weight_block_size is {block_size}; only [{BLOCK}, {BLOCK}] is supported")
    for name, (shape, _) in hf_tensors(hf).items():
        dtype, scale = source.dtype(name), name + SCALE_SUFFIX
        if dtype != FP8_DTYPE:
            if dtype.itemsize == 1:
                problems.append(f"{name} has dtype {dtype}; quantised weights must be {FP8_DTYPE}")
            continue
        expected = tuple(-(-size // BLOCK) for size in shape)
        if scale not in source.names():
            problems.append(f"{name} is FP8 and has no {scale}")
        elif source.shape(scale) != expected:
            problems.append(
                f"{scale} has shape {source.shape(scale)}; {shape} in {BLOCK} x {BLOCK} blocks is {expected}"
            )
    raise_problems(f"FP8 checkpoint {source.path}", problems, "Fetch the checkpoint again, index included.")


def _read_entries(path: Path) -> dict[str, Region]:
    weight_map = _read_weight_map(path)
    of_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        of_file.setdefault(file_name, []).append(name)
    problems: list[str] = []
    entries: dict[str, Region] = {}
    for file_name, names in sorted(of_file.items()):
        try:
            found = dict(_read_header(path / file_name))
        except ValueError as error:
            problems.append(f"{error}; the index places {len(names)} tensors in it: {shown_names(names)}")
            continue
        problems.extend(
            f"{file_name} does not hold {name}, which the index places there" for name in names if name not in found
        )
        entries.update((name, found[name]) for name in names if name in found)
    raise_problems(f"checkpoint {path}", problems, "Fetch or make the named files again.")
    return entries


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> file from the index, or from the only file when there is no index."""
    index = path / INDEX_NAME
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no safetensors index (JSON with a weight_map): {error!r}") from error
        return dict(weight_map)
    if (path / SINGLE_NAME).exists():
        return {name: SINGLE_NAME for name, _ in _read_header(path / SINGLE_NAME)}
    raise ValueError(f"{path} holds neither {INDEX_NAME} nor {SINGLE_NAME}; give a directory in Hugging Face form")


def _read_header(file: Path) -> list[tuple[str, Region]]:
    """Tensors of one safetensors file; ValueError when the file is missing, cut short or not safetensors at all."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} is truncated or not safetensors: {size} bytes do not hold its header")
        try:
            header = json.loads(stream.read(header_bytes))
            tensors = {name: spec for name, spec in header.items() if name != "__metadata__"}
            begin = 8 + header_bytes
            end = begin + max((spec["data_offsets"][1] for spec in tensors.values()), default=0)
            entries = [
                (name, Region(file, begin + spec["data_offsets"][0], tuple(spec["shape"]), DTYPES[spec["dtype"]]))
                for name, spec in tensors.items()
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file.name} has an unreadable safetensors header: {error!r}") from error
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise ValueError(f"{file.name} is {state}: {size} bytes on disk, its header calls for {end}")
    for (name, entry), spec in zip(entries, tensors.values(), strict=True):
        start, stop = spec["data_offsets"]
        if stop - start != entry.num_bytes:
            raise ValueError(f"{file.name}: {name} takes {stop - start} bytes, its shape {entry.shape} does not")
    return entries
