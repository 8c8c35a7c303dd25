"""What a conversion will take, from the plan alone: files, bytes, peak memory, disk."""

from __future__ import annotations

import math
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from hf_formats.config import HFModelConfig
from mindspeed_llm.conversion.engine import Conversion, RunOptions, partial_directory
from mindspeed_llm.conversion.slab_reader import in_flight_bytes
from mindspeed_llm.conversion.synced_file import WAITING_BYTES
from mindspeed_llm.hf_shapes import hf_tensors, shared_copies

_RECORD_BYTES = 200  # of the journal's record of a tensor, in memory until the manifest is written


@dataclass(frozen=True)
class Forecast:
    """``num_parameters`` counts each once; ``file_bytes`` is path -> size, of shards a rank's bytes.

    ``tensor_peak_bytes`` is the most that the slab being made takes with all that it is made of, and what waits to be
    written; a process has ``process_bytes`` beside it (interpreter, torch, plan, journal).
    """

    num_parameters: int
    file_bytes: dict[str, int]
    tensor_peak_bytes: int
    process_bytes: int
    num_workers: int
    free_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the output's tensor files."""
        return sum(self.file_bytes.values())

    @property
    def peak_bytes(self) -> int:
        """Most memory of one worker."""
        return self.process_bytes + self.tensor_peak_bytes

    def lines(self) -> list[str]:
        """For people."""
        sizes = self.file_bytes.values()
        workers = f", in each of {self.num_workers} workers" if self.num_workers > 1 else ""
        verdict = "enough" if self.free_bytes >= self.num_bytes else "NOT ENOUGH"
        return [
            f"parameters     {self.num_parameters:,}",
            f"files          {len(sizes)}",
            f"bytes          {self.num_bytes:,} ({self.num_bytes / 1e9:.1f} GB)",
            f"bytes of a file (rank)  {min(sizes):,} to {max(sizes):,}",
            f"peak memory    {_mib(self.peak_bytes)} MiB{workers}: tensors {_mib(self.tensor_peak_bytes)} MiB, "
            f"the process itself {_mib(self.process_bytes)} MiB",
            f"disk           {self.num_bytes / 1e9:.1f} GB needed, {self.free_bytes / 1e9:.1f} GB free: {verdict}",
        ]


def forecast(conversion: Conversion, hf: HFModelConfig, output: Path, options: RunOptions) -> Forecast:
    """Walk the plan of every file; nothing is read or written."""
    writer, slab_peak, num_tensors, sizes = conversion.writer, 0, 0, {}
    for file in writer.files():
        sizes[file] = writer.file_bytes(file)
        for tensor in writer.tensors(file):
            num_tensors += 1
            slab_peak = max(slab_peak, in_flight_bytes(tensor, conversion.source, options.max_bytes))
    copies = shared_copies(hf)
    num_parameters = sum(math.prod(shape) for name, (shape, _) in hf_tensors(hf).items() if name not in copies)
    free = shutil.disk_usage(_existing(partial_directory(output.absolute()))).free
    own_bytes = process_bytes() + num_tensors * _RECORD_BYTES
    return Forecast(num_parameters, sizes, slab_peak + WAITING_BYTES, own_bytes, options.num_workers, free)


def process_bytes() -> int:
    """The most memory that this process has had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)
