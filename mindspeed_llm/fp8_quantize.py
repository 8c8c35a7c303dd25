"""Command: a BF16 checkpoint to the form in which DeepSeek publishes (FP8 weights, block scales, MTP layer, shards).

MTP tensors are taken from the input when it has them. Otherwise they are made up so that the file layout is the
published one: the transformer layer is a copy of the last decoder layer, enorm and hnorm are ones, eh_proj [H, 2H] is
[0 | I] (it passes the hidden state through and ignores the embedding), embed_tokens, shared_head.norm and
shared_head.head are copies of the main model's. Such a module is untrained; it is there to be stored, not to predict.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.fp8 import FP8_DTYPE
from hf_formats.ranges import Ranges, shape_of
from mindspeed_llm.conversion.command import conversion_parser, run_conversion
from mindspeed_llm.conversion.engine import Conversion, RunOptions, convert
from mindspeed_llm.conversion.hf_writer import HFWriter, published, published_config, shards_by_count
from mindspeed_llm.conversion.inputs import open_input
from mindspeed_llm.hf_shapes import hf_tensors, mtp_tensors
from mindspeed_llm.weight_source import WeightSource


def quantize_checkpoint(input_dir: Path, output_dir: Path, num_shards: int = 4, num_mtp_layers: int = 1) -> bool:
    """Write the published form of ``input_dir`` to ``output_dir``; False when it is there already."""
    return convert(plan_quantize(input_dir, num_shards, num_mtp_layers), output_dir, RunOptions())


def plan_quantize(input_dir: Path, num_shards: int, num_mtp_layers: int, dry_run: bool = False) -> Conversion:
    """The published form of ``input_dir``.

    ``num_shards`` is an upper limit: a file holds at least one weight. Unquantised tensors become BF16, the router's
    correction bias fp32.
    """
    if num_shards < 1 or num_mtp_layers < 0:
        raise ValueError(
            f"--num-shards is {num_shards} and --num-nextn-predict-layers {num_mtp_layers}; use >= 1, >= 0"
        )
    found = open_input(input_dir, mtp_num_layers=0, dry_run=dry_run)
    hf = found.hf
    if num_mtp_layers and not hf.has_moe_mtp:
        raise ValueError(f"{input_dir}: the last layer has no experts, so no MTP layer can be made from it")
    if any(found.source.dtype(name) == FP8_DTYPE for name in hf_tensors(hf)):
        raise ValueError(f"{input_dir} holds FP8 weights already; give the BF16 checkpoint")
    specs = dict(hf_tensors(hf))
    for layer in range(hf.num_hidden_layers, hf.num_hidden_layers + num_mtp_layers):
        specs |= mtp_tensors(hf, layer)
    tensors = [published(name, shape) for name, (shape, _) in specs.items()]
    config = published_config(found.config, num_mtp_layers)
    writer = HFWriter(shards_by_count(tensors, num_shards), config, input_dir)
    source = WithMTP(found.source, hf)
    arguments = {"num_shards": num_shards, "num_nextn_predict_layers": num_mtp_layers}
    return Conversion("fp8_quantize", arguments, found.files, source, writer, hf)


@dataclass(frozen=True)
class WithMTP:
    """``source`` and, where it has none, made-up multi-token-prediction modules."""

    source: WeightSource
    hf: HFModelConfig

    def names(self) -> Collection[str]:
        """Those of the source; any layer behind the decoder can be read besides."""
        return self.source.names()

    def dtype(self, hf_name: str) -> torch.dtype:
        """Stored dtype, of what is made up fp32 or that of what it copies."""
        original = self._original(hf_name)
        return torch.float32 if original is None else self.source.dtype(original)

    def read(self, hf_name: str, ranges: Ranges) -> Tensor:
        """The slice of the tensor, or of its stand-in."""
        original = self._original(hf_name)
        if original is not None:
            return self.source.read(original, ranges)
        if not hf_name.endswith("eh_proj.weight"):
            return torch.ones(shape_of(ranges))
        (top, bottom), (left, right) = ranges
        rows, columns = torch.arange(top, bottom), torch.arange(left, right)
        return (rows[:, None] + self.hf.hidden_size == columns).float()

    def _original(self, hf_name: str) -> str | None:
        """The source's tensor that is read for ``hf_name``; None for norms of ones and for eh_proj."""
        if hf_name in self.source.names():
            return hf_name
        _, _, layer, rest = hf_name.split(".", 3)
        assert int(layer) >= self.hf.num_hidden_layers, f"{hf_name} was checked to be in the input"
        if rest in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            return None
        stand_ins = {
            "embed_tokens.weight": "model.embed_tokens.weight",
            "shared_head.norm.weight": "model.norm.weight",
            "shared_head.head.weight": "lm_head.weight",
        }
        return stand_ins.get(rest, f"model.layers.{self.hf.num_hidden_layers - 1}.{rest}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.fp8_quantize``."""
    parser = conversion_parser("fp8_quantize", __doc__)
    parser.add_argument("--input-bf16-hf-path", type=Path, required=True, help="plain checkpoint")
    parser.add_argument("--output-fp8-hf-path", dest="output", type=Path, required=True, help="directory to make")
    parser.add_argument("--num-shards", type=int, default=4, help="number of safetensors files, at most")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=1, help="MTP layers to write")
    return run_conversion(
        parser,
        lambda given: plan_quantize(
            given.input_bf16_hf_path, given.num_shards, given.num_nextn_predict_layers, given.dry_run
        ),
        argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
