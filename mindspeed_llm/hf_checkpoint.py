"""Hugging Face checkpoints on disk: checked when opened, read by the slice, written as a stream of tensors."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig, read_config_dict, without_quantisation_and_mtp
from hf_formats.file_region import FileReader
from hf_formats.files import write_json
from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, num_blocks, quantization_problems
from hf_formats.problems import raise_problems
from hf_formats.ranges import Ranges
from hf_formats.safetensors import DTYPE_NAMES, INDEX_NAME, read_directory
from hf_formats.stored_extras import unread_extras
from mindspeed_llm.cli_io import atomic_directory, copy_companions, name_end_token
from mindspeed_llm.conversion.synced_file import SyncedFile
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.weight_source import Checkpoint, read_region

DEFAULT_SHARD_BYTES = 5_000_000_000
HEADER_BYTES = (256 << 10) - 8  # kept free before the data and filled up with blanks, which the format allows


class HFCheckpoint(Checkpoint):
    """A directory of safetensors shards; nothing is read before ``read`` asks for it except the shards' headers.

    The constructor checks every shard that the index names: a missing file, a file shorter than its header says, a
    tensor that the index places in a file which does not hold it. One ValueError lists all of them. What is read is
    mapped, and the mapping ends with the tensor.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._entries = read_directory(self.path)
        self._slices = FileReader()
        self._mapped_bytes = 0

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
        return self._entries.keys()

    def where(self, hf_name: str) -> str:
        return str(self._entries[hf_name].file)

    def leave_out_extras(self, tie_word_embeddings: bool) -> None:
        """Forget what ``unread_extras`` names; ValueError for a tied head that is no copy of the embedding."""
        for name in unread_extras(self.path, self._entries, tie_word_embeddings):
            del self._entries[name]

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return self._entries[hf_name].shape

    def dtype(self, hf_name: str) -> torch.dtype:
        return self._entries[hf_name].dtype

    def read(self, hf_name: str, ranges: Ranges | None = None) -> Tensor:
        """The slice (default: all) of a tensor in its stored dtype: rows as a view of the file, mapped privately; where
        columns are cut, a copy, for which just the pages that hold them are read."""
        entry = self._entries.get(hf_name)
        if entry is None:
            raise ValueError(f"{self.path} has no tensor {hf_name}")
        if ranges is not None and ranges[1:] != tuple((0, size) for size in entry.shape[1:]):
            return self._slices.read(hf_name, entry, ranges)
        rows = read_region(entry, ranges)
        self._mapped_bytes += rows.nbytes
        return rows


def open_hf(path: str | Path, hf: HFModelConfig) -> HFCheckpoint:
    """An HF directory, BF16 or FP8, whose every shard and scale is there and of this model.

    It reads headers only, and a stored head whose config ties it to the embedding, to compare both.
    """
    source = HFCheckpoint(path)
    source.leave_out_extras(hf.tie_word_embeddings)
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
    """Writes a stream of tensors as ``model-00001-of-0000N.safetensors`` and an index; holds one tensor at a time.

    The header of a file, for which room is kept before the data, is written when its tensors are.
    """

    def __init__(self, directory: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._file: SyncedFile | None = None
        self._entries: list[str] = []  # the open file's header
        self._num_bytes = 0  # the open file's tensors
        self._names: list[list[str]] = []  # the tensors of every file
        self.stored: list[tuple[torch.dtype, int]] = []  # dtype and bytes of every tensor

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._file is not None:
            self._file.__exit__(*problem)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor, in a new file where the open one has no room; OSError when the disk cannot take it."""
        tensor = tensor.detach().cpu().contiguous()
        if self._file is not None and not self._has_room(name, tensor):
            self._finish_file(self._file)
        if self._file is None:
            self._file = SyncedFile(self._temporary(len(self._names))).__enter__()
            self._file.seek(8 + HEADER_BYTES)
            self._entries, self._num_bytes = ['{"__metadata__":{"format":"pt"}'], 0
            self._names.append([])
        self._entries.append(self._entry(name, tensor))
        self._num_bytes += tensor.nbytes
        self._names[-1].append(name)
        self.stored.append((tensor.dtype, tensor.nbytes))
        self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Close the last file, give all files their final names and write the index with ``total_size``."""
        if self._file is not None:
            self._finish_file(self._file)
        weight_map = {}
        for number, names in enumerate(self._names):
            file_name = f"model-{number + 1:05d}-of-{len(self._names):05d}.safetensors"
            self._temporary(number).rename(self._directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": sum(num_bytes for _, num_bytes in self.stored)}, "weight_map": weight_map}
        write_json(self._directory / INDEX_NAME, index)

    def _has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether file and header stay within their limits, and the tensor begins at a multiple of its element size."""
        header_bytes = len(",".join((*self._entries, self._entry(name, tensor)))) + len("}")
        is_aligned = self._num_bytes % tensor.element_size() == 0
        return is_aligned and header_bytes <= HEADER_BYTES and self._num_bytes + tensor.nbytes <= self._max_shard_bytes

    def _entry(self, name: str, tensor: Tensor) -> str:
        """The header's part of a tensor that comes next; ASCII, so as many bytes as characters."""
        offsets = [self._num_bytes, self._num_bytes + tensor.nbytes]
        spec = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        return f"{json.dumps(name)}:{json.dumps(spec, separators=(',', ':'))}"

    def _finish_file(self, file: SyncedFile) -> None:
        """Write the header and make all of the file durable."""
        header = (",".join(self._entries) + "}").encode().ljust(HEADER_BYTES)
        file.seek(0)
        file.write(HEADER_BYTES.to_bytes(8, "little") + header)
        file.sync()
        file.__exit__(None, None, None)
        self._file = None

    def _temporary(self, number: int) -> Path:
        return self._directory / f"model-{number + 1:05d}.safetensors.part"


def save_hf_checkpoint(
    tensors: Iterable[tuple[str, Tensor]],
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
    tensors: Iterable[tuple[str, Tensor]], directory: Path, hf_config_dir: Path, max_shard_bytes: int
) -> None:
    """Shards, index, config.json and tokenizer files into ``directory``, which exists and is empty."""
    num_mtp = 0
    with ShardedWriter(directory, max_shard_bytes) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
            num_mtp += name.endswith(".enorm.weight")  # one in every MTP module
        writer.finish()
    copy_companions(hf_config_dir, directory)
    write_json(directory / "config.json", plain_config(read_config_dict(hf_config_dir), num_mtp, writer.stored))
    name_end_token(directory)


def plain_config(
    config: Mapping[str, Any], mtp_num_layers: int, stored: Iterable[tuple[torch.dtype, int]]
) -> dict[str, Any]:
    """config.json of plain weights: no quantisation, the MTP layers that are there, the dtype that most bytes have.

    ``stored``: dtype and bytes of the tensors.
    """
    sizes = Counter[torch.dtype]()
    for dtype, num_bytes in stored:
        sizes[dtype] += num_bytes
    main_dtype = max(sizes, key=lambda dtype: sizes[dtype])
    cleaned = {key: value for key, value in without_quantisation_and_mtp(config).items() if key != "dtype"}
    written = {"num_nextn_predict_layers": mtp_num_layers, "torch_dtype": str(main_dtype).removeprefix("torch.")}
    return cleaned | written


def _check_scales(source: HFCheckpoint, hf: HFModelConfig, config: Mapping[str, Any]) -> None:
    """ValueError listing every FP8 weight without its scales of 128 x 128 blocks; ``config`` is config.json as read."""
    problems = quantization_problems(config)
    for name, (shape, _) in hf_tensors(hf).items():
        dtype, scale = source.dtype(name), name + SCALE_SUFFIX
        if dtype != FP8_DTYPE:
            if dtype.itemsize == 1:
                problems.append(f"{name} has dtype {dtype}; quantised weights must be {FP8_DTYPE}")
            continue
        expected = tuple(map(num_blocks, shape))
        if scale not in source.names():
            problems.append(f"{name} is FP8 and has no {scale}")
        elif source.shape(scale) != expected:
            problems.append(
                f"{scale} has shape {source.shape(scale)}; {shape} in {BLOCK} x {BLOCK} blocks is {expected}"
            )
    raise_problems(f"FP8 checkpoint {source.path}", problems, "Fetch the checkpoint again, index included.")
