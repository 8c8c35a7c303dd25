"""Command: DeepSeek's published FP8 checkpoint to a plain BF16 one, right as it stands (no MTP, clean config)."""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.conversion.command import conversion_parser, positive, run_conversion
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.hf_writer import HFTensor, HFWriter, shards_by_bytes
from mindspeed_llm.conversion.inputs import open_input
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES, plain_config
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.weight_source import plain_dtype


def plan_cast(
    input_dir: Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES, mtp_num_layers: int = 0, dry_run: bool = False
) -> Conversion:
    """The BF16 form of ``input_dir``.

    FP8 weights are multiplied by their blocks' scales and rounded to BF16, other tensors copied, scales and MTP layers
    after the first ``mtp_num_layers`` dropped, config.json and index written to match, tokenizer files copied.
    """
    found = open_input(input_dir, mtp_num_layers, dry_run)
    tensors = [
        HFTensor(name, shape, plain_dtype(found.source, name)) for name, (shape, _) in hf_tensors(found.hf).items()
    ]
    sizes = ((tensor.dtype, tensor.num_bytes) for tensor in tensors)
    config = plain_config(found.config, found.hf.mtp_num_layers, sizes)
    writer = HFWriter(shards_by_bytes(tensors, max_shard_bytes), config, input_dir)
    arguments = {"max_shard_bytes": max_shard_bytes, "mtp_num_layers": mtp_num_layers}
    return Conversion("fp8_cast_bf16", arguments, found.files, found.source, writer, found.hf)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.fp8_cast_bf16``."""
    parser = conversion_parser("fp8_cast_bf16", __doc__)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="directory as DeepSeek publishes it")
    parser.add_argument("--output-bf16-hf-path", dest="output", type=Path, required=True, help="directory to make")
    parser.add_argument("--max-shard-bytes", type=positive, default=DEFAULT_SHARD_BYTES, help="size limit of a file")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to keep")
    return run_conversion(
        parser,
        lambda given: plan_cast(
            given.input_fp8_hf_path, given.max_shard_bytes, given.num_nextn_predict_layers, given.dry_run
        ),
        argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
