"""safetensors directories: where every tensor lies, from the headers alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hf_formats.file_region import FileRegion
from hf_formats.problems import raise_problems, shown_names

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {  # by the names of the safetensors format
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


def read_directory(path: Path) -> dict[str, FileRegion]:
    """Return tensor name -> region for a Hugging Face directory, file by file, as the index places them.

    Without an index, ``model.safetensors`` counts, or all ``*.safetensors`` when there is none. One ValueError lists
    every file that is missing, truncated or longer than its header says, and every tensor that the index places in a
    file which does not hold it.
    """
    regions: dict[str, FileRegion] = {}
    problems: list[str] = []
    for file_name, names in _tensors_of_files(path).items():
        try:
            found = read_header(path / file_name)
        except ValueError as error:
            problems.append(f"{error}" + (f"; it should hold {shown_names(names)}" if names else ""))
            continue
        lost = [name for name in names if name not in found]
        problems += [f"{file_name} does not hold {name}, which the index places there" for name in lost]
        regions.update((name, found[name]) for name in names or found if name in found)
    raise_problems(f"checkpoint {path}", problems, "Fetch or make the named files again.")
    return regions


def read_header(file: Path) -> dict[str, FileRegion]:
    """Return tensor name -> region for one file; ValueError when it is missing, truncated or not safetensors."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} is truncated or not safetensors: {size} bytes do not hold its header")
        content = stream.read(header_bytes)
    start = 8 + header_bytes
    try:
        specs = {name: spec for name, spec in json.loads(content).items() if name != "__metadata__"}
        ends = {name: start + spec["data_offsets"][1] for name, spec in specs.items()}
        regions = {
            name: FileRegion(file, start + spec["data_offsets"][0], tuple(spec["shape"]), DTYPES[spec["dtype"]])
            for name, spec in specs.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} has an unreadable safetensors header: {error!r}") from error
    end = max(ends.values(), default=start)
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise ValueError(f"{file.name} is {state}: {size} bytes on disk, its header calls for {end}")
    for name, region in regions.items():
        num_bytes = ends[name] - region.offset
        if num_bytes != region.num_bytes:
            raise ValueError(f"{file.name}: {name} takes {num_bytes} bytes, its shape {region.shape} does not")
    return regions


def _tensors_of_files(path: Path) -> dict[str, list[str]]:
    """File name -> tensors that the index places in it; the lists are empty when there is no index."""
    index = path / INDEX_NAME
    if not index.exists():
        names = [file.name for file in sorted(path.glob("*.safetensors"))]
        if not names:
            raise ValueError(
                f"{path} holds neither {INDEX_NAME} nor {SINGLE_NAME}; give a directory in Hugging Face form"
            )
        return {name: [] for name in ([SINGLE_NAME] if SINGLE_NAME in names else names)}
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no safetensors index (JSON with a weight_map): {error!r}") from error
    of_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        of_file.setdefault(file_name, []).append(name)
    return dict(sorted(of_file.items()))
