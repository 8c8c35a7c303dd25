"""The parts of a GPU day in order of worth, and `python -m tools.gpu_day.parts PART ...`, which runs one of them."""

from __future__ import annotations

import argparse
import importlib
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.megatron.flash_attention_form import flash_attention_on_cpu
from tools.gpu_day.rows import Rows


@dataclass(frozen=True)
class Part:
    """``function`` (a name in ``module``) of a device and the part's rows; limit_s: the most that it may take."""

    module: str
    function: str
    limit_s: float


PARTS = {
    "training ops": Part("tools.gpu_day.parity", "training_ops", 90),
    "rollout ops": Part("tools.gpu_day.parity", "rollout_ops", 90),
    "training model": Part("tools.gpu_day.parity", "training_model", 60),
    "rollout model": Part("tools.gpu_day.parity", "rollout_models", 90),
    "decode": Part("tools.gpu_day.speed", "decode", 120),
    "training": Part("tools.gpu_day.speed", "training", 90),
    "fp8 training": Part("tools.gpu_day.fp8_training", "fp8_training", 150),
    "prefill": Part("tools.gpu_day.speed", "prefill", 90),
    "sleep": Part("tools.gpu_day.speed", "sleep", 60),
}


def resolved_device(asked: str | None) -> str:
    """cuda where there is one, unless another is asked for; SystemExit where the one that is asked for is not there."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU (torch.cuda.is_available()); leave --device out, or use cpu")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_day.parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the rows")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    options = parser.parse_args()
    device = resolved_device(options.device)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    part = PARTS[options.part]
    run = getattr(importlib.import_module(part.module), part.function)
    with flash_attention_on_cpu() if device == "cpu" else nullcontext():
        run(device, Rows(options.out, options.part, judges=device == "cuda"))


if __name__ == "__main__":
    main()
