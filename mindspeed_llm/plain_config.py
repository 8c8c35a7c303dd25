"""Command: config.json and tokenizer of a quantised model, as its BF16 form has them, where no weights are needed."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_formats.config import parse_hf_config, read_config_dict
from hf_formats.files import write_json
from mindspeed_llm.cli_io import companion_files, copy_companions, name_end_token, run_cli, run_once, say
from mindspeed_llm.hf_checkpoint import plain_config


def write_plain_config(hf_dir: Path, out_dir: Path, mtp_num_layers: int = 0) -> bool:
    """Make ``out_dir`` from ``hf_dir``: config.json without quantisation, with the first ``mtp_num_layers`` MTP layers
    alone, and the files beside the weights.

    Returns False when ``out_dir`` already is that. ValueError when config.json cannot be read, is of an unknown family
    or has fewer such layers, or when ``out_dir`` is something else.
    """
    raw = read_config_dict(hf_dir)
    parse_hf_config(raw, str(hf_dir / "config.json")).with_mtp(mtp_num_layers)

    def build(building: Path) -> None:
        write_json(building / "config.json", plain_config(raw, mtp_num_layers, [(torch.bfloat16, 1)]))
        copy_companions(hf_dir, building)
        name_end_token(building)

    arguments = {"mtp_num_layers": mtp_num_layers} if mtp_num_layers else {}
    return run_once(out_dir, "plain_config", arguments, [hf_dir / "config.json", *companion_files(hf_dir)], build)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m mindspeed_llm.plain_config``."""
    parser = argparse.ArgumentParser(prog="python -m mindspeed_llm.plain_config", description=__doc__)
    parser.add_argument("--input-hf-path", type=Path, required=True, help="directory with config.json and tokenizer")
    parser.add_argument("--output-hf-path", type=Path, required=True, help="directory to make")
    parser.add_argument("--num-nextn-predict-layers", type=int, default=0, help="MTP layers to keep")

    def body(given: argparse.Namespace) -> None:
        is_new = write_plain_config(given.input_hf_path, given.output_hf_path, given.num_nextn_predict_layers)
        say(f"{given.output_hf_path}: {'config and tokenizer, no weights' if is_new else 'already made'}")

    return run_cli(parser, body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
