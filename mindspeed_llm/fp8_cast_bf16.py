"""Command: DeepSeek's published FP8 checkpoint to a plain BF16 one, right as it stands (no MTP, clean config)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from mindspeed_llm.cli_io import hf_files, progress, run_cli, run_once, say
from mindspeed_llm.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, dequantize
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES, HFCheckpoint, check_against_config, write_hf_files
from mindspeed_llm.hf_config import HFModelConfig, parse_hf_config, read_config_dict
from mindspeed_llm.hf_shapes import hf_bytes, hf_tensors
from mindspeed_llm.sources import raise_problems


def cast_fp8_to_bf16(
    input_dir: Path, output_dir: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES, mtp_num_layers: int = 0
) -> bool:
    """Write the BF16 form of ``input_dir`` to ``output_dir``; False when it is there already from the same input.

    FP8 weights are multiplied by their blocks' scales and rounded to BF16, other tensors copied, scales and MTP layers
    after the first ``mtp_num_layers`` dropped, config.json and index written to match, tokenizer files copied. One
    shard is in memory at a time.
    """
    config = read_config_dict(input_dir)
    hf = parse_hf_config(config, source=str(input_dir / "config.json")).with_mtp(mtp_num_layers)
    with HFCheckpoint(input_dir) as source:
        check_against_config(source, hf)
        _check_scales(source, hf, (config.get("quantization_config") or {}).get("weight_block_size"))

        def build(building: Path) -> None:
            write_hf_files(_plain_tensors(source, hf), building, input_dir, max_shard_bytes)

        arguments = {"max_shard_bytes": max_shard_bytes, "mtp_num_layers": mtp_num_layers}
        return run_once(output_dir, "fp8_cast_bf16", arguments, hf_files(input_dir), build, hf_bytes(hf))


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.fp8_cast_bf16``."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_llm.fp8_cast_bf16", description=__doc__)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="directory as DeepSeek publishes it")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="directory to make")
    parser.add_argument("--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="size limit of one shard file")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to keep")

    def body(arguments: argparse.Namespace) -> None:
        out = arguments.output_bf16_hf_path
        num_mtp = arguments.num_nextn_predict_layers
        is_new = cast_fp8_to_bf16(arguments.input_fp8_hf_path, out, arguments.max_shard_bytes, num_mtp)
        say(f"BF16 checkpoint written to {out}" if is_new else f"BF16 checkpoint {out} is complete; nothing to do")

    return run_cli(parser, body, argv)


def _plain_tensors(source: HFCheckpoint, hf: HFModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    names = list(hf_tensors(hf))
    with progress() as bar:
        for name in bar.track(names, description="FP8 to BF16, tensors"):
            tensor = source.read(name)
            if tensor.dtype == FP8_DTYPE:
                tensor = dequantize(tensor, source.read(name + SCALE_SUFFIX))
            yield name, tensor


def _check_scales(source: HFCheckpoint, hf: HFModelConfig, block_size: list[int] | None) -> None:
    problems = []
    if block_size not in (None, [BLOCK, BLOCK]):
        problems.append(f"weight_block_size is {block_size}; only [{BLOCK}, {BLOCK}] is supported")
    for name, (shape, _) in hf_tensors(hf).items():
        dtype, scale = source.dtype(name), name + SCALE_SUFFIX
        if dtype != FP8_DTYPE:
            if dtype.itemsize == 1:
                problems.append(f"{name} has dtype {dtype}; quantised weights must be {FP8_DTYPE}")
            continue
        expected = tuple(-(-size // BLOCK) for size in shape)
        if scale not in source.names():
            problems.append(f"{name} is FP8 and has no {scale}")
        elif source.shape(scale) != expected:
            problems.append(
                f"{scale} has shape {source.shape(scale)}; {shape} in {BLOCK} x {BLOCK} blocks is {expected}"
            )
    raise_problems(f"FP8 checkpoint {source.path}", problems, "Fetch the checkpoint again, index included.")


if __name__ == "__main__":
    raise SystemExit(main())
