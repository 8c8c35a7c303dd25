"""Command: a checkpoint (Hugging Face, BF16 or FP8, or shards of another layout) to one file per (tp, pp, ep) rank in
MindSpeed-LLM's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_formats.config import HFModelConfig
from hf_formats.problems import raise_problems
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.command import add_checkpoint_flags, conversion_parser, positive, run_conversion
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.inputs import input_config, open_input
from mindspeed_llm.conversion.rank_writer import RankWriter
from mindspeed_llm.sharded_checkpoint import shard_layout
from mindspeed_llm.weight_plan import Naming, plan_problems, raise_layout_problems


def plan_shards(
    load_dir: Path,
    layout: ParallelLayout,
    naming: Naming,
    mtp_num_layers: int = 0,
    dry_run: bool = False,
    hf_config_dir: Path | None = None,
) -> Conversion:
    """``load_dir`` for the ranks of ``layout``, the first ``mtp_num_layers`` multi-token-prediction modules too.

    FP8 weights become BF16, with no copy of the checkpoint in between; a tensor that several ranks hold is read once
    for each. ``hf_config_dir`` is for training checkpoints, which do not say of which model they are.
    """
    found = open_input(load_dir, mtp_num_layers, dry_run, hf_config_dir)
    raise_layout_problems(found.hf, layout)
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    writer = RankWriter(found.source, config, mtp_num_layers, layout, naming)
    arguments = {"layout": repr(layout), "naming": naming, "mtp_num_layers": mtp_num_layers}
    return Conversion("convert_ckpt_deepseek3", arguments, found.files, found.source, writer, found.hf)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_deepseek3``."""
    parser = conversion_parser("convert_ckpt_deepseek3", __doc__)
    add_checkpoint_flags(parser)
    add_layout_flags(parser, "target")
    parser.add_argument("--num-layers", type=int, help="must agree with config.json, which is the default")
    parser.add_argument("--first-k-dense-replace", type=int, help="must agree with config.json, which is the default")

    def plan(given: argparse.Namespace) -> Conversion:
        hf = input_config(given.hf_config_dir or given.load_dir)
        layout, naming = given_layout(given, "target", hf)
        problems = _flag_problems(given, hf) + plan_problems(hf, layout)
        raise_problems("the layout that these flags ask for", problems)
        num_mtp, config_dir = given.num_nextn_predict_layers, given.hf_config_dir
        return plan_shards(given.load_dir, layout, naming, num_mtp, given.dry_run, config_dir)

    return run_conversion(parser, plan, argv)


def add_layout_flags(parser: argparse.ArgumentParser, prefix: str) -> None:
    """The layout flags that both directions share; ``prefix`` is target or source."""
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{prefix}-{axis}-parallel-size", type=positive, help=f"{axis}-parallel size (default: 1)"
        )
    parser.add_argument(
        "--num-layer-list", type=layer_list, help="layers of each pipeline stage, as 7,7,8 (default: even)"
    )
    parser.add_argument(
        "--num-layers-per-virtual-pipeline-stage", type=positive, help="layers of a chunk (default: no virtual stages)"
    )
    parser.add_argument(
        "--noop-layers", type=layer_list, default=(), help="slots that hold no layer, counted from 0, as 61,62,63"
    )
    parser.add_argument("--moe-grouped-gemm", action="store_true", help="one tensor for all experts of a rank")
    parser.add_argument(
        "--moe-tp-extend-ep", action="store_true", help="tensor-parallel ranks hold whole experts of their own"
    )


def given_layout(given: argparse.Namespace, prefix: str, hf: HFModelConfig) -> tuple[ParallelLayout, Naming]:
    """The layout that the flags of ``add_layout_flags`` state, and how experts are stored in it.

    ValueError when layers do not divide, and for the one combination that has no reader.
    """
    if given.moe_tp_extend_ep and not given.moe_grouped_gemm:
        raise ValueError(
            "--moe-tp-extend-ep needs --moe-grouped-gemm: MindSpeed-LLM cuts ungrouped experts over TP even then, "
            "and mixes up their gate and up halves; give both flags or neither"
        )
    tensor, pipeline, expert = (
        getattr(given, f"{prefix}_{axis}_parallel_size") or 1 for axis in ("tensor", "pipeline", "expert")
    )
    layout = shard_layout(
        tensor,
        pipeline,
        expert,
        tp_extend_ep=given.moe_tp_extend_ep,
        num_layer_list=given.num_layer_list,
        virtual_pipeline=_num_chunks(given, hf, pipeline),
        noop_layers=given.noop_layers,
    )
    return layout, "mindspeed_llm" if given.moe_grouped_gemm else "mindspeed_llm_ungrouped"


def _num_chunks(given: argparse.Namespace, hf: HFModelConfig, pipeline_parallel: int) -> int:
    """Virtual stages of a pipeline stage."""
    per_chunk = given.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return 1
    if given.num_layer_list is not None:
        raise ValueError("--num-layer-list and --num-layers-per-virtual-pipeline-stage exclude each other")
    num_slots = hf.num_hidden_layers + len(given.noop_layers)
    if num_slots % (pipeline_parallel * per_chunk):
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk}; {num_slots} layers and no-op layers do not "
            f"divide into chunks of {per_chunk} on {pipeline_parallel} pipeline stages"
        )
    return int(num_slots // (pipeline_parallel * per_chunk))


def layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layer counts such as 7,7,8") from None


def _flag_problems(arguments: argparse.Namespace, hf: HFModelConfig) -> list[str]:
    problems = []
    for flag, given, actual in (
        ("--num-layers", arguments.num_layers, hf.num_hidden_layers + len(arguments.noop_layers)),
        ("--first-k-dense-replace", arguments.first_k_dense_replace, hf.first_k_dense_replace),
    ):
        if given is not None and given != actual:
            problems.append(f"{flag} is {given}; {arguments.load_dir} says {actual}")
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
