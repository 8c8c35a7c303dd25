"""Command: a sharded checkpoint (mp_rank_* files) back to Hugging Face form."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.cli_io import companion_files, progress, run_cli, run_once, say
from mindspeed_llm.convert_ckpt_deepseek3 import add_layout_flags, expert_naming, num_chunks
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES, write_hf_files
from mindspeed_llm.hf_config import load_hf_config
from mindspeed_llm.hf_shapes import hf_bytes
from mindspeed_llm.sharded_checkpoint import ShardedCheckpoint, read_manifest, shard_layout
from mindspeed_llm.weight_plan import Naming


def convert_to_hf(
    load_dir: Path,
    save_dir: Path,
    hf_config_dir: Path,
    layout: ParallelLayout | None = None,
    naming: Naming = "mindspeed_llm",
    mtp_num_layers: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> bool:
    """Write the sharded ``load_dir`` as an HF directory; False when it is there already from the same input.

    config.json and tokenizer come from ``hf_config_dir``. ``layout``, ``naming`` and ``mtp_num_layers`` are for
    checkpoints without a layout manifest; with one they may be left out and must not contradict it.
    """
    hf = load_hf_config(hf_config_dir).with_mtp(mtp_num_layers)
    source = ShardedCheckpoint(load_dir, hf, layout, naming)
    if layout is not None and (layout, naming) != (source.layout, source.naming):
        raise ValueError(f"{load_dir} was written for {source.layout} ({source.naming}), not {layout} ({naming})")

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        with progress() as bar:
            for name in bar.track(list(source.names()), description="shards to HF, tensors"):
                yield name, source.read(name)

    def build(building: Path) -> None:
        write_hf_files(tensors(), building, hf_config_dir, max_shard_bytes)

    inputs = [*source.files(), hf_config_dir / "config.json", *companion_files(hf_config_dir)]
    arguments = {"max_shard_bytes": max_shard_bytes, "layout": repr(source.layout), "naming": source.naming}
    return run_once(save_dir, "convert_ckpt_deepseek3_mcore2hf", arguments, inputs, build, hf_bytes(source.hf))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_deepseek3_mcore2hf``."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.convert_ckpt_deepseek3_mcore2hf",
        description=f"{__doc__} The layout is read from layout.json; give it as flags for checkpoints without one.",
        allow_abbrev=False,
    )
    parser.add_argument("--load-dir", type=Path, required=True, help="sharded checkpoint")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    parser.add_argument("--hf-config-dir", type=Path, required=True, help="where config.json and tokenizer come from")
    parser.add_argument("--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="size limit of one shard file")
    add_layout_flags(parser, "source", default=None)
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers in the sharded checkpoint")

    def body(arguments: argparse.Namespace) -> None:
        layout, naming = _layout_of(arguments)
        num_mtp = arguments.num_nextn_predict_layers
        out = arguments.save_dir
        is_new = convert_to_hf(
            arguments.load_dir, out, arguments.hf_config_dir, layout, naming, num_mtp, arguments.max_shard_bytes
        )
        say(f"HF checkpoint written to {out}" if is_new else f"HF checkpoint {out} is complete; nothing to do")

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
    if not any(sizes) and not any(others) and read_manifest(arguments.load_dir) is not None:
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
