"""Command: a checkpoint of a run as Hugging Face safetensors, by upstream's name for it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mindspeed_llm import convert_ckpt_deepseek3_mcore2hf

_SAID_BY_CONFIG = "without effect: config.json and the checkpoint say it"


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m verl.model_merger``; returns the exit status."""
    parser = argparse.ArgumentParser("python -m verl.model_merger", description=__doc__)
    parser.add_argument("operation", choices=("merge",))
    parser.add_argument("--backend", choices=("megatron", "fsdp"), help="without effect: checkpoints of both are alike")
    parser.add_argument("--local_dir", type=Path, required=True, help="global_step_N/actor, or the folder of a run's")
    parser.add_argument("--target_dir", required=True, help="directory to make")
    parser.add_argument("--hf_model_path", type=Path, help="directory of config.json and tokenizer")
    for flag in ("--tie-word-embedding", "--trust-remote-code", "--use_cpu_initialization"):
        parser.add_argument(flag, action="store_true", help=_SAID_BY_CONFIG)
    given = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("one process merges any checkpoint: start it by python, not by torchrun")
    inside = [folder / "huggingface" for folder in (given.local_dir, given.local_dir.parent)]
    places = [given.hf_model_path] if given.hf_model_path else inside
    config = next((place for place in places if (place / "config.json").is_file()), None)
    if config is None:
        parser.error(
            f"there is no config.json in {' or '.join(map(str, places))}: give the trained model's directory, "
            "actor_rollout_ref.model.path, as --hf_model_path"
        )
    flags = {"--load-dir": given.local_dir, "--save-dir": given.target_dir, "--hf-config-dir": config}
    return convert_ckpt_deepseek3_mcore2hf.main([text for flag in flags.items() for text in map(str, flag)])


if __name__ == "__main__":
    sys.exit(main())
