"""Command: a BF16 Hugging Face checkpoint to one file per (tp, pp, ep) rank in MindSpeed-LLM's layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.cli_io import hf_files, progress, run_cli, run_once, say
from mindspeed_llm.hf_checkpoint import HFCheckpoint, check_against_config
from mindspeed_llm.hf_config import HFModelConfig, parse_hf_config, read_config_dict
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.sharded_checkpoint import shard_layout, write_sharded
from mindspeed_llm.weight_plan import Naming, local_plan, plan_bytes, plan_problems


def convert_to_sharded(
    load_dir: Path, save_dir: Path, layout: ParallelLayout, naming: Naming, mtp_num_layers: int = 0
) -> bool:
    """Write ``load_dir`` to ``save_dir`` for ``layout``; False when it is there already from the same input.

    The first ``mtp_num_layers`` multi-token-prediction modules are written too. One rank's tensors are in memory at a
    time; a tensor that several ranks hold is read once for each.
    """
    config = read_config_dict(load_dir)
    hf = parse_hf_config(config, source=str(load_dir / "config.json")).with_mtp(mtp_num_layers)
    _raise_layout_problems(plan_problems(hf, layout))
    with HFCheckpoint(load_dir) as source:
        check_against_config(source, hf)
        quantised = [name for name in hf_tensors(hf) if source.dtype(name).itemsize == 1]
        if quantised:
            raise ValueError(
                f"{load_dir} holds {len(quantised)} FP8 weights ({quantised[0]} ...); "
                "run python -m mindspeed_llm.fp8_cast_bf16 first"
            )

        def build(building: Path) -> None:
            with progress() as bar:
                task = bar.add_task("HF to shards, files", total=layout.world_size)
                write_sharded(source, config, layout, naming, building, lambda: bar.advance(task), mtp_num_layers)

        plans = (local_plan(hf, layout, layout.coords(rank), naming) for rank in range(layout.world_size))
        needed_bytes = sum(plan_bytes(plan) for plan in plans)
        arguments = {"layout": repr(layout), "naming": naming, "mtp_num_layers": mtp_num_layers}
        return run_once(save_dir, "convert_ckpt_deepseek3", arguments, hf_files(load_dir), build, needed_bytes)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_deepseek3``."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.convert_ckpt_deepseek3", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--load-dir", type=Path, required=True, help="BF16 checkpoint in Hugging Face form")
    parser.add_argument("--save-dir", type=Path, required=True, help="directory to make")
    add_layout_flags(parser, "target", default=1)
    parser.add_argument("--num-layers", type=int, help="must agree with config.json, which is the default")
    parser.add_argument("--first-k-dense-replace", type=int, help="must agree with config.json, which is the default")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to write")

    def body(arguments: argparse.Namespace) -> None:
        hf = parse_hf_config(read_config_dict(arguments.load_dir), source=str(arguments.load_dir / "config.json"))
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
        is_new = convert_to_sharded(arguments.load_dir, arguments.save_dir, layout, expert_naming(arguments), num_mtp)
        state = "written to" if is_new else "is complete; nothing to do:"
        say(f"sharded checkpoint of {layout.world_size} files {state} {arguments.save_dir}")

    return run_cli(parser, body, argv)


def add_layout_flags(parser: argparse.ArgumentParser, prefix: str, default: int | None) -> None:
    """The layout flags that both directions share; ``prefix`` is target or source."""
    for axis in ("tensor", "pipeline", "expert"):
        parser.add_argument(
            f"--{prefix}-{axis}-parallel-size", type=_positive, default=default, help=f"{axis}-parallel size"
        )
    parser.add_argument(
        "--num-layer-list", type=layer_list, help="layers of each pipeline stage, as 7,7,8 (default: even)"
    )
    parser.add_argument(
        "--num-layers-per-virtual-pipeline-stage", type=_positive, help="layers of a chunk (default: no virtual stages)"
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
            problems.append(f"{flag} is {given}; {arguments.load_dir / 'config.json'} says {actual}")
    return problems


def _raise_layout_problems(problems: list[str]) -> None:
    if problems:
        raise ValueError("these flags do not fit the model:\n" + "\n".join(f"  - {line}" for line in problems))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive size")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
