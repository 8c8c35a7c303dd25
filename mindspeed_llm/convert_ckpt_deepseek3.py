"""Command: a checkpoint (Hugging Face, BF16 or FP8, or shards of another layout) to one file per (tp, pp, ep) rank in
MindSpeed-LLM's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.cli_io import run_cli
from mindspeed_llm.conversion.command import Request, add_run_flags, positive, run_request
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.inputs import input_config, open_input
from mindspeed_llm.conversion.rank_writer import RankWriter
from mindspeed_llm.sharded_checkpoint import shard_layout
from mindspeed_llm.weight_plan import Naming, plan_problems


def plan_shards(
    load_dir: Path,
    layout: ParallelLayout,
    naming: Naming,
    mtp_num_layers: int = 0,
    dry_run: bool = False,
    hf_config_dir: Path | None = None,
) -> Request:
    """``load_dir`` for the ranks of ``layout``, the first ``mtp_num_layers`` multi-token-prediction modules too.

    FP8 weights become BF16, with no copy of the checkpoint in between; a tensor that several ranks hold is read once
    for each. ``hf_config_dir`` is for training checkpoints, which do not say of which model they are.
    """
    found = open_input(load_dir, mtp_num_layers, dry_run, hf_config_dir)
    _raise_layout_problems(plan_problems(found.hf, layout))
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    writer = RankWriter(found.source, config, mtp_num_layers, layout, naming)
    arguments = {"layout": repr(layout), "naming": naming, "mtp_num_layers": mtp_num_layers}
    return Request(Conversion("convert_ckpt_deepseek3", arguments, found.files, found.source, writer), found.hf)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_deepseek3``."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.convert_ckpt_deepseek3", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--load-dir", type=Path, required=True, help="checkpoint: Hugging Face form, shards, training")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    add_layout_flags(parser, "target", default=1)
    parser.add_argument("--hf-config-dir", type=Path, help="where config.json is, for a training checkpoint")
    parser.add_argument("--num-layers", type=int, help="must agree with config.json, which is the default")
    parser.add_argument("--first-k-dense-replace", type=int, help="must agree with config.json, which is the default")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to write")

    add_run_flags(parser)

    def body(arguments: argparse.Namespace) -> None:
        def request() -> Request:
            hf = input_config(arguments.hf_config_dir or arguments.load_dir)
            layout = shard_layout(
                arguments.target_tensor_parallel_size,
                arguments.target_pipeline_parallel_size,
                arguments.target_expert_parallel_size,
                tp_extend_ep=arguments.moe_tp_extend_ep,
                num_layer_list=arguments.num_layer_list,
                virtual_pipeline=num_chunks(arguments, hf, arguments.target_pipeline_parallel_size),
                noop_layers=arguments.noop_layers,
            )
            _raise_layout_problems(_flag_problems(arguments, hf) + plan_problems(hf, layout))
            num_mtp = arguments.num_nextn_predict_layers
            naming, config_dir = expert_naming(arguments), arguments.hf_config_dir
            return plan_shards(arguments.load_dir, layout, naming, num_mtp, arguments.dry_run, config_dir)

        run_request(arguments, arguments.save_dir, request)

    return run_cli(parser, body, argv)


def add_layout_flags(parser: argparse.ArgumentParser, prefix: str, default: int | None) -> None:
    """The layout flags that both directions share; ``prefix`` is target or source."""
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{prefix}-{axis}-parallel-size", type=positive, default=default, help=f"{axis}-parallel size"
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


def expert_naming(arguments: argparse.Namespace) -> Naming:
    """How experts are stored under these flags; refuses the one combination that has no reader."""
    if arguments.moe_tp_extend_ep and not arguments.moe_grouped_gemm:
        raise ValueError(
            "--moe-tp-extend-ep needs --moe-grouped-gemm: MindSpeed-LLM cuts ungrouped experts over TP even then, "
            "and mixes up their gate and up halves; give both flags or neither"
        )
    return "mindspeed_llm" if arguments.moe_grouped_gemm else "mindspeed_llm_ungrouped"


def num_chunks(arguments: argparse.Namespace, hf: HFModelConfig, pipeline_parallel: int) -> int:
    """Virtual stages of a pipeline stage under these flags; ValueError when they do not divide."""
    per_chunk = arguments.num_layers_per_virtual_pipeline_stage
    if per_chunk is None:
        return 1
    if arguments.num_layer_list is not None:
        raise ValueError("--num-layer-list and --num-layers-per-virtual-pipeline-stage exclude each other")
    num_slots = hf.num_hidden_layers + len(arguments.noop_layers)
    if num_slots % (pipeline_parallel * per_chunk):
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk}; {num_slots} layers and no-op layers do not "
            f"divide into chunks of {per_chunk} on {pipeline_parallel} pipeline stages"
        )
    return int(num_slots // (pipeline_parallel * per_chunk))


def layer_list(text: str) -> tuple[int, ...]:
    """Parse ``7,7,8``."""
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


def _raise_layout_problems(problems: list[str]) -> None:
    if problems:
        raise ValueError("these flags do not fit the model:\n" + "\n".join(f"  - {line}" for line in problems))


if __name__ == "__main__":
    raise SystemExit(main())
