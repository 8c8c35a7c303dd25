"""``python -m tools.workshop.bench.published_checkpoint``: DeepSeek-V3's true structure with narrower layers.

61 layers, 256 experts, the multi-token-prediction module, 163 files of FP8 weights and block scales: every tensor that
is published, each of its sizes divided. The weights are arbitrary bytes that are numbers; the same arguments make the
same bytes.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_formats.config import HFModelConfig, parse_hf_config
from hf_formats.fp8 import FP8_DTYPE
from hf_formats.ranges import Ranges, shape_of
from mindspeed_llm.cli_io import run_cli, say
from mindspeed_llm.conversion.engine import Conversion, RunOptions, convert
from mindspeed_llm.conversion.hf_writer import HFTensor, HFWriter, published, published_config, shards_by_count
from mindspeed_llm.hf_shapes import hf_tensors
from tools.workshop.bench.models import deepseek_v3_config

NUM_FILES = 163
_POOL_ELEMENTS = (1 << 22) - 3  # a prime: rows of any width begin at other places of it


@dataclass(frozen=True)
class ArbitraryWeights:
    """Tensors in their published dtypes, as windows of one pool of values."""

    tensors: tuple[HFTensor, ...]

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def dtype(self, hf_name: str) -> torch.dtype:
        return self._stored[hf_name][1]

    def read(self, hf_name: str, ranges: Ranges) -> torch.Tensor:
        shape, dtype = self._stored[hf_name]
        width = math.prod(shape[1:])
        count = math.prod(shape_of(ranges))
        first = (zlib.crc32(hf_name.encode()) + ranges[0][0] * width) % _POOL_ELEMENTS
        pool = self._pools[dtype]
        parts = []
        while count:
            parts.append(pool[first : first + count])
            first, count = 0, count - parts[-1].numel()
        return torch.cat(parts).view(shape_of(ranges))

    @cached_property
    def _stored(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {stored.name: (stored.shape, stored.dtype) for tensor in self.tensors for stored in tensor.stored()}

    @cached_property
    def _pools(self) -> dict[torch.dtype, torch.Tensor]:
        noise = torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(0))
        return {
            FP8_DTYPE: (noise * 100).clamp(-448, 448).to(FP8_DTYPE),
            torch.bfloat16: (noise * 0.02).bfloat16(),
            torch.float32: noise.abs() * 1e-4 + 1e-5,
        }


def write_published_checkpoint(output: Path, config: dict[str, Any], num_files: int = NUM_FILES) -> bool:
    """The FP8 checkpoint that ``config`` describes; False when it is there already."""
    hf: HFModelConfig = parse_hf_config(config).with_mtp(config["num_nextn_predict_layers"])
    weights = [published(name, shape) for name, (shape, _) in hf_tensors(hf).items()]
    source = ArbitraryWeights(tuple(weights))
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as companions:
        writer = HFWriter(
            shards_by_count(weights, num_files), published_config(config, hf.mtp_num_layers), Path(companions)
        )
        arguments = {"config": config, "num_files": num_files}
        conversion = Conversion("published_checkpoint", arguments, (), source, writer)
        return convert(conversion, output, RunOptions(resume=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.bench.published_checkpoint", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--divide", type=int, default=8, help="every width is this much smaller (default: %(default)s)")

    def body(arguments: argparse.Namespace) -> None:
        is_new = write_published_checkpoint(arguments.output, deepseek_v3_config(arguments.divide))
        say(f"checkpoint {'written to' if is_new else 'is there already:'} {arguments.output}")

    return run_cli(parser, body, None if argv is None else list(argv))


if __name__ == "__main__":
    raise SystemExit(main())
