"""Command: a BF16 checkpoint to the form in which DeepSeek publishes (FP8 weights, block scales, MTP layer, shards).

MTP tensors are taken from the input when it has them. Otherwise they are made up so that the file layout is the
published one: the transformer layer is a copy of the last decoder layer, enorm and hnorm are ones, eh_proj [H, 2H] is
[0 | I] (it passes the hidden state through and ignores the embedding), embed_tokens, shared_head.norm and
shared_head.head are copies of the main model's. Such a module is untrained; it is there to be stored, not to predict.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.cli_io import copy_companions, hf_files, progress, run_cli, run_once, say, write_json
from mindspeed_llm.fp8 import FP8_DTYPE, QUANTIZATION_CONFIG, SCALE_SUFFIX, is_quantised, quantize_fp8_blockwise
from mindspeed_llm.hf_checkpoint import HFCheckpoint, ShardedWriter, check_against_config
from mindspeed_llm.hf_config import HFModelConfig, parse_hf_config, read_config_dict
from mindspeed_llm.hf_shapes import always_fp32, hf_bytes, hf_tensors, mtp_tensors


def quantize_checkpoint(input_dir: Path, output_dir: Path, num_shards: int = 4, num_mtp_layers: int = 1) -> bool:
    """Write the published form of ``input_dir`` to ``output_dir``; False when it is there already from the same input.

    ``num_shards`` is an upper limit: a shard holds at least one tensor. Unquantised tensors become BF16, the router's
    correction bias fp32.
    """
    if num_shards < 1 or num_mtp_layers < 0:
        raise ValueError(
            f"--num-shards is {num_shards} and --num-nextn-predict-layers {num_mtp_layers}; use >= 1, >= 0"
        )
    config = read_config_dict(input_dir)
    hf = parse_hf_config(config, source=str(input_dir / "config.json"))
    if num_mtp_layers and not hf.is_moe_layer(hf.num_hidden_layers - 1):
        raise ValueError(f"{input_dir}: the last layer has no experts, so no MTP layer can be made from it")
    with HFCheckpoint(input_dir) as source:
        check_against_config(source, hf)
        if any(source.dtype(name) == FP8_DTYPE for name in hf_tensors(hf)):
            raise ValueError(f"{input_dir} holds FP8 weights already; give the BF16 checkpoint")

        def build(building: Path) -> None:
            _write_published_form(source, hf, config, building, num_shards, num_mtp_layers)
            copy_companions(input_dir, building)

        arguments = {"num_shards": num_shards, "num_nextn_predict_layers": num_mtp_layers}
        return run_once(output_dir, "fp8_quantize", arguments, hf_files(input_dir), build, hf_bytes(hf) // 2)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.fp8_quantize``."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.fp8_quantize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input-bf16-hf-path", type=Path, required=True, help="plain checkpoint")
    parser.add_argument("--output-fp8-hf-path", type=Path, required=True, help="directory to make")
    parser.add_argument("--num-shards", type=int, default=4, help="number of safetensors files, at most")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=1, help="MTP layers to write")

    def body(arguments: argparse.Namespace) -> None:
        out = arguments.output_fp8_hf_path
        is_new = quantize_checkpoint(
            arguments.input_bf16_hf_path, out, arguments.num_shards, arguments.num_nextn_predict_layers
        )
        say(f"FP8 checkpoint written to {out}" if is_new else f"FP8 checkpoint {out} is complete; nothing to do")

    return run_cli(parser, body, argv)


def _write_published_form(
    source: HFCheckpoint, hf: HFModelConfig, config: dict[str, Any], directory: Path, num_shards: int, num_mtp: int
) -> None:
    names = list(hf_tensors(hf))
    for layer in range(hf.num_hidden_layers, hf.num_hidden_layers + num_mtp):
        names.extend(mtp_tensors(hf, layer))
    writer = ShardedWriter(directory)
    with progress() as bar:
        for position, name in enumerate(bar.track(names, description="BF16 to FP8, tensors")):
            if position * num_shards // len(names) != (position - 1) * num_shards // len(names):
                writer.cut()
            for stored_name, tensor in _stored(name, _read(source, hf, name)):
                writer.add(stored_name, tensor)
    writer.finish()
    published = {key: value for key, value in config.items() if key != "dtype"}
    published |= {"quantization_config": QUANTIZATION_CONFIG, "num_nextn_predict_layers": num_mtp}
    write_json(directory / "config.json", published | {"torch_dtype": "bfloat16"})


def _stored(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor as it is published: FP8 and its scale, or one tensor in BF16 or FP32."""
    if is_quantised(name):
        weight, scale = quantize_fp8_blockwise(tensor)
        yield name, weight
        yield name + SCALE_SUFFIX, scale
    else:
        yield name, tensor.to(torch.float32 if always_fp32(name) else torch.bfloat16)


def _read(source: HFCheckpoint, hf: HFModelConfig, name: str) -> torch.Tensor:
    if name in source.names():
        return source.read(name)
    _, _, layer, rest = name.split(".", 3)
    stand_ins = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.norm.weight": "model.norm.weight",
        "shared_head.head.weight": "lm_head.weight",
    }
    if rest in ("enorm.weight", "hnorm.weight"):
        return torch.ones(hf.hidden_size)
    if rest == "eh_proj.weight":
        eye = torch.eye(hf.hidden_size)
        return torch.cat([torch.zeros_like(eye), eye], dim=1)
    assert int(layer) >= hf.num_hidden_layers, f"{name} was checked to be in the input"
    return source.read(stand_ins.get(rest, f"model.layers.{hf.num_hidden_layers - 1}.{rest}"))


if __name__ == "__main__":
    raise SystemExit(main())
