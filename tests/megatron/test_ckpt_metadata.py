"""``.metadata`` of every Python and torch that writes it is read, and neither it nor a tensor's bytes are ever run."""

from __future__ import annotations

import io
import os
import pickle
from enum import Enum
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing import CheckpointSaver, load_checkpoint
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest, record_file, write_manifest
from megatron.core.dist_checkpointing.saved_tensors import METADATA, read_metadata, saved_tensors


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


class EnumsByName(pickle.Pickler):
    """Pickles enums as Python 3.11.0 to 3.11.4 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


class EnumsByValue(pickle.Pickler):
    """Pickles enums as all other versions do."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


def metadata(properties: Any = None) -> Metadata:
    """What frameworks write: tensors, objects, a plan, the folder, and Megatron-LM's own attribute."""
    size = torch.Size((4, 2))
    tensor = TensorStorageMetadata(properties or TensorProperties(torch.bfloat16), size, [])
    tensor.chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), size))
    found = Metadata(
        {"w": tensor, "rng_state/shard_0_1": BytesStorageMetadata()},
        planner_data={"w": ("model", "w"), "blocks": ("optimizer", 0)},
        storage_data={MetadataIndex("w", torch.Size((0, 0)), 0): _StorageInfo("__0_0.distcp", 0, 100)},
        storage_meta=StorageMeta(checkpoint_id=PosixPath("/runs/a"), save_id="1"),
    )
    found.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (4, 2)}}  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path_module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [EnumsByName, EnumsByValue])
def test_metadata_of_every_python_is_read(
    tmp_path: Path, pickler: type[pickle.Pickler], protocol: int, path_module: str
) -> None:
    content = io.BytesIO()
    pickler(content, protocol).dump(metadata())
    here = PosixPath.__module__.encode()
    text = content.getvalue()
    if protocol < 4:
        text = text.replace(b"c" + here + b"\n", f"c{path_module}\n".encode())
    else:  # without the frame, whose length would no longer fit
        plain = [b"\x8c" + bytes([len(name)]) + name for name in (here, path_module.encode())]
        text = text[:2] + text[11:].replace(*plain)
    (tmp_path / METADATA).write_bytes(text)
    found = read_metadata(tmp_path)
    assert found.state_dict_metadata == metadata().state_dict_metadata
    assert found.storage_data == metadata().storage_data
    assert found.storage_meta is not None and found.storage_meta.checkpoint_id == PurePosixPath("/runs/a")
    assert saved_tensors(tmp_path)["w"].dtype == torch.bfloat16


def test_metadata_of_torch_before_2_3_is_read(tmp_path: Path) -> None:
    """It names TensorProperties by the module of sharded tensors."""
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata(sharded_metadata.TensorProperties(torch.float32))))
    assert saved_tensors(tmp_path)["w"].dtype == torch.float32


def saved(folder: Path) -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2)
    CheckpointSaver().save(folder, model, None, None, {}, random_states=False)
    return model


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Change a file so that size and digest fit: a hostile checkpoint is a whole one."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    write_manifest(folder, Manifest(manifest.layout, dict(manifest.files) | {name: record_file(folder / name)}))


def test_a_load_does_not_run_what_metadata_holds(tmp_path: Path) -> None:
    model = saved(tmp_path / "saved")
    hostile = metadata()
    hostile.planner_data = Harmful(tmp_path / "ran")
    rewrite(tmp_path / "saved", METADATA, pickle.dumps(hostile))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: it refers to posix\.mkdir"):
        load_checkpoint(tmp_path / "saved", model, None, None, random_states=False)
    assert not (tmp_path / "ran").exists()


def test_a_load_does_not_run_what_stands_in_a_tensors_place(tmp_path: Path) -> None:
    model = saved(tmp_path / "saved")
    found = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    content = io.BytesIO()
    torch.save(Harmful(tmp_path / "ran"), content)
    found.storage_data = {
        index: _StorageInfo(info.relative_path, 0, len(content.getvalue()))
        for index, info in found.storage_data.items()
    }
    rewrite(tmp_path / "saved", METADATA, pickle.dumps(found))
    for file in (tmp_path / "saved").glob("*.distcp"):
        rewrite(tmp_path / "saved", file.name, content.getvalue())
    with pytest.raises(OSError, match="could not read"):
        load_checkpoint(tmp_path / "saved", model, None, None, random_states=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_with_its_file(tmp_path: Path, value: float) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1, 2] = value
    CheckpointSaver().save(tmp_path / "saved", model, None, None, {}, random_states=False)
    text = rf"weight model\.weight of __0_0\.distcp is {value} at \(1, 2\)"
    with pytest.raises(ValueError, match=text):
        load_checkpoint(tmp_path / "saved", model, None, None, random_states=False)
