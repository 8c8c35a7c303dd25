"""Command: shards (mp_rank_* files, or torch.distributed.checkpoint) back to Hugging Face form, plain or in FP8."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_formats.config import load_hf_config, read_config_dict
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.cli_io import companion_files
from mindspeed_llm.conversion.command import add_checkpoint_flags, conversion_parser, positive, run_conversion
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.hf_writer import HFTensor, HFWriter, published, published_config, shards_by_bytes
from mindspeed_llm.convert_ckpt_deepseek3 import add_layout_flags, given_layout
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, is_dcp, weights_of
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES, plain_config
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint, read_layout
from mindspeed_llm.weight_plan import Naming


def plan_hf(
    load_dir: Path,
    hf_config_dir: Path,
    layout: ParallelLayout | None = None,
    naming: Naming = "mindspeed_llm",
    mtp_num_layers: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    to_fp8: bool = False,
) -> Conversion:
    """The sharded ``load_dir`` as an HF directory, with ``to_fp8`` as DeepSeek publishes (weights quantised again).

    config.json and tokenizer come from ``hf_config_dir``. ``layout``, ``naming`` and ``mtp_num_layers`` are for
    checkpoints without a layout manifest; with one they may be left out and must not contradict it.
    """
    source = _open(load_dir, hf_config_dir, layout, naming, mtp_num_layers)
    hf, config, specs = source.hf, read_config_dict(hf_config_dir), hf_tensors(source.hf)
    if to_fp8:
        tensors = [published(name, shape) for name, (shape, _) in specs.items()]
        config = published_config(config, hf.mtp_num_layers)
    else:
        tensors = [HFTensor(name, shape, source.dtype(name)) for name, (shape, _) in specs.items()]
        config = plain_config(config, hf.mtp_num_layers, ((tensor.dtype, tensor.num_bytes) for tensor in tensors))
    writer = HFWriter(shards_by_bytes(tensors, max_shard_bytes), config, hf_config_dir)
    inputs = (*source.files(), hf_config_dir / "config.json", *companion_files(hf_config_dir))
    arguments = {"max_shard_bytes": max_shard_bytes, "source": source.describe(), "to_fp8": to_fp8}
    return Conversion("convert_ckpt_deepseek3_mcore2hf", arguments, inputs, source, writer, hf)


def _open(
    load_dir: Path, hf_config_dir: Path, layout: ParallelLayout | None, naming: Naming, mtp_num_layers: int
) -> ShardedCheckpoint | DCPCheckpoint:
    hf = load_hf_config(hf_config_dir)
    if is_dcp(load_dir):
        if layout is not None:
            raise ValueError(f"{load_dir} is a distributed checkpoint, which has no layout; leave the flags for it out")
        written = read_layout(load_dir) or {}
        return DCPCheckpoint(load_dir, hf.with_mtp(mtp_num_layers or written.get("mtp_num_layers", 0)))
    source = ShardedCheckpoint(load_dir, hf.with_mtp(mtp_num_layers), layout, naming)
    if layout is not None and (layout, naming) != (source.layout, source.naming):
        raise ValueError(f"{load_dir} was written for {source.layout} ({source.naming}), not {layout} ({naming})")
    return source


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_deepseek3_mcore2hf``."""
    description = f"{__doc__}\nThe layout is read from layout.json; give it as flags for checkpoints without one."
    parser = conversion_parser("convert_ckpt_deepseek3_mcore2hf", description)
    add_checkpoint_flags(parser, needs_hf_config=True)
    parser.add_argument("--max-shard-bytes", type=positive, default=DEFAULT_SHARD_BYTES, help="size limit of a file")
    add_layout_flags(parser, "source")
    parser.add_argument("--fp8", action="store_true", help="quantise the weights again, as DeepSeek publishes them")

    def plan(given: argparse.Namespace) -> Conversion:
        load_dir = weights_of(given.load_dir)
        sizes = (getattr(given, f"source_{axis}_parallel_size") for axis in ("tensor", "pipeline", "expert"))
        chunks, experts = given.num_layers_per_virtual_pipeline_stage, (given.moe_grouped_gemm, given.moe_tp_extend_ep)
        is_given = any((*sizes, given.num_layer_list, chunks, given.noop_layers, *experts))
        layout: ParallelLayout | None = None
        naming: Naming = "mindspeed_llm"
        if is_given or not (read_layout(load_dir) is not None or is_dcp(load_dir)):
            layout, naming = given_layout(given, "source", load_hf_config(given.hf_config_dir))
        num_mtp, max_bytes = given.num_nextn_predict_layers, given.max_shard_bytes
        return plan_hf(load_dir, given.hf_config_dir, layout, naming, num_mtp, max_bytes, given.fp8)

    return run_conversion(parser, plan, argv)


if __name__ == "__main__":
    raise SystemExit(main())
