"""Command: a checkpoint (Hugging Face, BF16 or FP8, or shards of either kind) to torch.distributed.checkpoint.

The output has the keys of the training engine's own checkpoints and no layout: any layout loads its part of it, with
use_dist_checkpointing.
"""

from __future__ import annotations

from pathlib import Path

from mindspeed_llm.conversion.command import add_checkpoint_flags, conversion_parser, positive, run_conversion
from mindspeed_llm.conversion.dcp_writer import DCPWriter
from mindspeed_llm.conversion.engine import Conversion
from mindspeed_llm.conversion.inputs import open_input
from mindspeed_llm.hf_checkpoint import DEFAULT_SHARD_BYTES
from mindspeed_llm.hf_shapes import hf_bytes


def plan_torch_dist(
    load_dir: Path,
    num_files: int | None = None,
    mtp_num_layers: int = 0,
    hf_config_dir: Path | None = None,
    dry_run: bool = False,
) -> Conversion:
    """``load_dir`` in ``num_files`` files (default: of 5 GB), the first ``mtp_num_layers`` MTP modules too.

    ``hf_config_dir`` is for training checkpoints, which do not say of which model they are.
    """
    found = open_input(load_dir, mtp_num_layers, dry_run, hf_config_dir)
    count = num_files or -(-hf_bytes(found.hf) // DEFAULT_SHARD_BYTES)
    writer = DCPWriter(found.source, found.config, mtp_num_layers, count)
    arguments = {"num_files": count, "mtp_num_layers": mtp_num_layers}
    return Conversion("convert_ckpt_torch_dist", arguments, found.files, found.source, writer, found.hf)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.convert_ckpt_torch_dist``."""
    parser = conversion_parser("convert_ckpt_torch_dist", __doc__)
    add_checkpoint_flags(parser)
    parser.add_argument("--num-files", type=positive, help="files to make (default: so many that one has 5 GB)")
    return run_conversion(
        parser,
        lambda given: plan_torch_dist(
            given.load_dir, given.num_files, given.num_nextn_predict_layers, given.hf_config_dir, given.dry_run
        ),
        argv,
    )


if __name__ == "__main__":
    raise SystemExit(main())
