"""Command: shards (mp_rank_* files, or torch.distributed.checkpoint) back to Hugging Face form, plain or in FP8."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_formats.config import load_hf_config, read_config_dict
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.cli_io import companion_files, run_cli
from mindspeed_llm.conversion.command import Request, add_run_flags, positive, run_request
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.hf_writer import (
    HFTensor,
    HFWriter,
    plain_config,
    published,
    published_config,
    shards_by_bytes,
)
from mindspeed_llm.convert_ckpt_deepseek3 import add_layout_flags, expert_naming, num_chunks
from mindspeed_llm.dcp_checkpoint import DCPCheckpoint, is_dcp
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint, read_layout, shard_layout
from mindspeed_llm.weight_plan import Naming


def plan_hf(
    load_dir: Path,
    hf_config_dir: Path,
    layout: ParallelLayout | None = None,
    naming: Naming = "mindspeed_llm",
    mtp_num_layers: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    to_fp8: bool = False,
) -> Request:
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
        config = plain_config(config, hf, tensors)
    writer = HFWriter(shards_by_bytes(tensors, max_shard_bytes), config, hf_config_dir)
    inputs = (*source.files(), hf_config_dir / "config.json", *companion_files(hf_config_dir))
    arguments = {"max_shard_bytes": max_shard_bytes, "source": source.describe(), "to_fp8": to_fp8}
    return Request(Conversion("convert_ckpt_deepseek3_mcore2hf", arguments, inputs, source, writer), hf)


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
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.convert_ckpt_deepseek3_mcore2hf",
        description=f"{__doc__} The layout is read from layout.json; give it as flags for checkpoints without one.",
        allow_abbrev=False,
    )
    parser.add_argument("--load-dir", type=Path, required=True, help="shards of either kind, or a training checkpoint")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--hf-config-dir", type=Path, required=True, help="where config.json and tokenizer come from")
    parser.add_argument("--max-shard-bytes", type=positive, default=DEFAULT_SHARD_BYTES, help="size limit of a file")
    add_layout_flags(parser, "source", default=None)
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers in the sharded checkpoint")

    parser.add_argument("--fp8", action="store_true", help="quantise the weights again, as DeepSeek publishes them")
    add_run_flags(parser)

    def body(arguments: argparse.Namespace) -> None:
        def request() -> Request:
            layout, naming = _layout_of(arguments)
            return plan_hf(
                arguments.load_dir,
                arguments.hf_config_dir,
                layout,
                naming,
                arguments.num_nextn_predict_layers,
                arguments.max_shard_bytes,
                arguments.fp8,
            )

        run_request(arguments, arguments.save_dir, request)

    return run_cli(parser, body, argv)


def _layout_of(arguments: argparse.Namespace) -> tuple[ParallelLayout | None, Naming]:
    """The layout that the flags state; None when there are none and the manifest is to say."""
    sizes = [
        arguments.source_tensor_parallel_size,
        arguments.source_pipeline_parallel_size,
        arguments.source_expert_parallel_size,
    ]
    others = (
        arguments.num_layer_list,
        arguments.num_layers_per_virtual_pipeline_stage,
        arguments.noop_layers,
        arguments.moe_grouped_gemm,
        arguments.moe_tp_extend_ep,
    )
    has_own = read_layout(arguments.load_dir) is not None or is_dcp(arguments.load_dir)
    if not any(sizes) and not any(others) and has_own:
        return None, "mindspeed_llm"
    tensor, pipeline, expert = (size or 1 for size in sizes)
    layout = shard_layout(
        tensor,
        pipeline,
        expert,
        tp_extend_ep=arguments.moe_tp_extend_ep,
        num_layer_list=arguments.num_layer_list,
        virtual_pipeline=num_chunks(arguments, load_hf_config(arguments.hf_config_dir), pipeline),
        noop_layers=arguments.noop_layers,
    )
    return layout, expert_naming(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
