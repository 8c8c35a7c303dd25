"""The conversion engine: each file of an output written in bounded memory and journaled, all renamed at the end."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_formats.config import HFModelConfig
from hf_formats.files import sync_path
from hf_formats.problems import raise_problems
from mindspeed_llm.cli_io import create_parent, digest_file, progress, replace_directory
from mindspeed_llm.conversion.kernels import KernelsName, load_kernels
from mindspeed_llm.conversion.manifest import (
    JOURNAL_NAME,
    Journal,
    WeightsManifest,
    damage,
    is_whole,
    open_journal,
    read_manifest,
    rest_crc32,
    write_manifest,
)
from mindspeed_llm.conversion.pool import run_tasks
from mindspeed_llm.conversion.slab_reader import SlabReader
from mindspeed_llm.conversion.synced_file import SyncedFile
from mindspeed_llm.conversion.writer import ByteSlabs, FileRecord, StoredTensor, TensorRecord, Writer
from mindspeed_llm.weight_source import WeightSource


@dataclass(frozen=True)
class Conversion:
    """What is converted into what. ``arguments`` (no paths) and the contents of ``inputs`` decide the output.

    ``hf``: the model that is written. ``source`` and ``writer`` are pickled into worker processes.
    """

    command: str
    arguments: Mapping[str, Any]
    inputs: tuple[Path, ...]
    source: WeightSource
    writer: Writer
    hf: HFModelConfig

    def made_from(self) -> dict[str, Any]:
        """What decides the output, as journal and manifest keep it; reads samples of the inputs."""
        digests = [[file.name, digest_file(file)] for file in self.inputs]  # names only: a copy is the same input
        return {"command": self.command, "arguments": dict(self.arguments), "inputs": digests}


@dataclass(frozen=True)
class RunOptions:
    """How to run: processes over files, memory of each for tensors in flight (see ``SlabReader``), and whether an
    unfinished output may be continued."""

    num_workers: int = 1
    max_bytes: int = 256 << 20
    resume: bool = False
    kernels: KernelsName = "torch"


def convert(conversion: Conversion, output: Path, options: RunOptions) -> bool:
    """Make ``output``; False when it is there already, whole and from the same input.

    Work is in ``<output>.partial`` until it is complete. A file appears there whole or not at all, so a run that was
    killed or met a full disk continues with ``options.resume`` and repeats only what it was in the middle of. An output
    of the same command is replaced; anything else in the way is a ValueError.
    """
    output = output.absolute()
    made_from = conversion.made_from()
    if _is_made_from(output, made_from):
        return False
    _check_replaceable(output, conversion.command)
    building = partial_directory(output)
    create_parent(building)
    if not _is_made_from(building, made_from):  # else a run was cut when only the renaming was left
        if not building.exists():
            _check_space(building.parent, sum(map(conversion.writer.file_bytes, conversion.writer.files())))
        with open_journal(building, made_from, options.resume) as journal:
            _remove_unfinished(building, journal)
            _write_files(conversion, building, journal, options)
            conversion.writer.finish(building, journal.records)
            write_manifest(building, conversion.writer.kind, made_from, journal.records)
    (building / JOURNAL_NAME).unlink(missing_ok=True)  # a run may have been cut between this and the renaming
    replace_directory(building, output)
    return True


def partial_directory(output: Path) -> Path:
    """Where an output is until it is complete."""
    return output.with_name(f"{output.name}.partial")


def verify(output: Path, num_workers: int) -> WeightsManifest:
    """Read all of a converted checkpoint; ValueError naming each damaged, cut or missing file and its tensors."""
    manifest = read_manifest(output)
    if manifest is None:
        raise ValueError(f"{output} has no manifest of a conversion, so there is nothing to verify it by")
    files = sorted([*manifest.files, *manifest.beside])
    total = sum(record.num_bytes for record in manifest.files.values())
    problems: list[str] = []
    with progress(f"verifying {output.name}", total) as advance:
        for _, found in run_tasks(partial(damage, output, manifest), files, num_workers, advance):
            problems += found
    raise_problems(
        f"{output}", sorted(problems), "Convert again: remove the output, or the named files' source is lost."
    )
    return manifest


def _write_files(conversion: Conversion, building: Path, journal: Journal, options: RunOptions) -> None:
    writer = conversion.writer
    todo = [file for file in writer.files() if file not in journal.records]
    sizes = {file: writer.file_bytes(file) for file in todo}
    _check_space(building, sum(sizes.values()))
    num_files = len(journal.records) + len(todo)
    work = partial(write_file, conversion.source, writer, building, options)
    with progress(f"{conversion.command}, {len(todo)} of {num_files} files to write", sum(sizes.values())) as advance:
        try:
            for file, record in run_tasks(work, todo, options.num_workers, advance):
                journal.append(file, record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            left = sum(size for file, size in sizes.items() if file not in journal.records)
            raise ValueError(
                f"the disk of {building} is full; {len(journal.records)} of {num_files} files are finished and kept. "
                f"Free {left / 1e9:.1f} GB there and run the same command with --resume"
            ) from error


def write_file(
    source: WeightSource,
    writer: Writer,
    directory: Path,
    options: RunOptions,
    file: str,
    on_bytes: Callable[[int], None],
) -> FileRecord:
    """Write one file under a temporary name, make it durable, give it its name."""
    target = directory / file
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    reader = SlabReader(source, options.max_bytes, load_kernels(options.kernels), on_bytes)
    handed: dict[str, ByteSlabs] = {}

    def slabs(tensor: StoredTensor) -> ByteSlabs:
        handed[tensor.name] = found = reader(tensor)
        return found

    try:
        with SyncedFile(temporary) as stream:
            offsets = writer.write(file, stream, slabs)
            stream.sync()
            tensors = {
                tensor.name: TensorRecord(offsets[tensor.name], tensor.num_bytes, handed[tensor.name].crc32)
                for tensor in writer.tensors(file)
            }
            num_bytes = os.fstat(stream.fileno()).st_size
            assert num_bytes == writer.file_bytes(file), f"{file}: {num_bytes} bytes"
            record = FileRecord(num_bytes, rest_crc32(stream, num_bytes, tensors), tensors)
        os.replace(temporary, target)
        sync_path(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return record


def _is_made_from(directory: Path, made_from: Mapping[str, Any]) -> bool:
    manifest = read_manifest(directory)
    return manifest is not None and manifest.made_from == made_from and is_whole(directory, manifest)


def _check_replaceable(output: Path, command: str) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    manifest = read_manifest(output)
    if manifest is None or manifest.made_from["command"] != command:
        raise ValueError(f"{output} exists and was not made by {command}; remove it or choose another output path")


def _check_space(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{directory} needs {needed_bytes / 1e9:.1f} GB more and its disk has {free_bytes / 1e9:.1f} GB free; "
            "free some space or choose an output path on another disk"
        )


def _remove_unfinished(building: Path, journal: Journal) -> None:
    """Whatever a run that was cut left beside its finished files."""
    kept = {building / JOURNAL_NAME, *(building / file for file in journal.records)}
    for path in building.rglob("*"):
        if path.is_file() and path not in kept:
            path.unlink(missing_ok=True)
